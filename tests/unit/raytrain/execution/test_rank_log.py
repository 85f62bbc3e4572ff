"""What a rank prints: into its log, and whole lines of rank 0 to the driver."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from raytrain.execution.reporter import rank_log
from raytrain.runs.folder import RunFolder


def test_lines_of_several_threads_reach_the_driver_complete_and_numbered(tmp_path: Path) -> None:
    sent: list[tuple[int, str]] = []
    attempt_ids: set[str] = set()

    def send(attempt_id: str, number: int, text: str) -> str:
        attempt_ids.add(attempt_id)
        sent.append((number, text))
        return f"call {number}"

    waited: list[Any] = []
    with rank_log(RunFolder(str(tmp_path)), 0, print_lines=send, wait=lambda calls, **how: waited.append((calls, how))):
        print("started,", end="")
        other = threading.Thread(target=lambda: print("another thread's", "line"))
        other.start()
        other.join()
        print(" and ended")
        print("to stderr", file=sys.stderr)
        assert sent == [(0, "another thread's line\n"), (1, "started, and ended\n"), (2, "to stderr\n")]
        print("without an end", end="")
        assert len(sent) == 3
    assert sent[3:] == [(3, "without an end\n")] and len(attempt_ids) == 1
    assert waited == [([f"call {number}" for number in range(4)], {"num_returns": 4, "timeout": 5.0})]
    assert "another thread's line\n" in (tmp_path / "logs" / "rank_00000.log").read_text()


def test_output_during_a_report_to_the_driver_is_reported_too(tmp_path: Path) -> None:
    sent: list[tuple[int, str]] = []

    def send(attempt_id: str, number: int, text: str) -> None:
        if number == 0:
            print("a warning")
        sent.append((number, text))

    with rank_log(RunFolder(str(tmp_path)), 0, print_lines=send):
        print("a line")
    assert sorted(sent) == [(0, "a line\n"), (1, "a warning\n")]


def test_of_a_line_that_is_written_over_the_last_state_is_kept(tmp_path: Path, capsys: Any) -> None:
    sent: list[str] = []
    with rank_log(RunFolder(str(tmp_path)), 0, print_lines=lambda attempt_id, number, text: sent.append(text)):
        for part in range(1, 101):
            print(f"\rLoading weights: {part}%", end="", file=sys.stderr)
        assert sent == [], "not before it ends"
        print(file=sys.stderr)
        for part in ("10%\r", "20%\r", "done\r\n"):
            print(part, end="")
        print("before ", end="")
        print("\r1/2", end="")
        print("\r2/2\nthe next line, ", end="")
        print("in two pieces")
        print("\rgone\r    \rended at 7", end="")
    wanted = ["Loading weights: 100%", "done", "2/2", "the next line, in two pieces", "ended at 7"]
    assert "".join(sent).splitlines() == wanted
    log = (tmp_path / "logs" / "rank_00000.log").read_text()
    assert log.splitlines() == [*wanted[:2], "before ", *wanted[2:]] and "\r" not in log
    assert capsys.readouterr() == ("", ""), "Ray may forward the stream below: the driver would show a line twice"
    with rank_log(RunFolder(str(tmp_path)), 1, print_lines=None):
        print("\r1%\r2%", end="", file=sys.stderr)
    assert capsys.readouterr().err == "\r1%\r2%", "of another rank, as the program prints it"
