"""What a rank prints: into its log, and whole lines of rank 0 to the driver."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from raytrain.rank_log import rank_log
from raytrain.run_folder import RunFolder


def test_lines_of_several_threads_reach_the_driver_whole_and_numbered(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    with rank_log(RunFolder(str(tmp_path)), 0, say=lambda number, text: told.append((number, text))):
        print("begun,", end="")
        other = threading.Thread(target=lambda: print("another thread's", "line"))
        other.start()
        other.join()
        print(" and ended")
        print("to stderr", file=sys.stderr)
        assert told == [(0, "another thread's line\n"), (1, "begun, and ended\n"), (2, "to stderr\n")]
        print("without an end", end="")
        assert len(told) == 3
    assert told[3:] == [(3, "without an end\n")]
    assert "another thread's line\n" in (tmp_path / "logs" / "rank_00000.log").read_text()


def test_what_telling_the_driver_prints_itself_is_told_too(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []

    def say(number: int, text: str) -> None:
        if number == 0:
            print("a warning")
        told.append((number, text))

    with rank_log(RunFolder(str(tmp_path)), 0, say=say):
        print("a line")
    assert sorted(told) == [(0, "a line\n"), (1, "a warning\n")]
