"""The claim on an output folder: one command writes, however many are refused meanwhile."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from raytrain.errors import InputError
from raytrain.infer.output import OutputFolder
from raytrain.runs.folder import Attempts, process_start


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_while_a_command_writes_every_other_is_refused_and_none_takes_its_claim_away(
    scheme: str, tmp_path: Path
) -> None:
    folder = OutputFolder(f"{scheme}{tmp_path}/out")

    def refused() -> bool:
        """A command that has passed the first check at the same moment."""
        with pytest.raises(InputError, match="to which process") as caught, folder.claimed({"rows": 2}):
            raise AssertionError("two commands write here")
        return "wait for its end" in str(caught.value)

    with folder.claimed({"rows": 1}):
        assert all(refused() for _ in range(3))
        with pytest.raises(InputError, match="to which process"):
            folder.check_free(resume=True)
        assert folder.identity() == {"rows": 1}
    folder.check_free(resume=True)
    with folder.claimed({"rows": 1}):
        assert refused(), "the next one writes, and is protected as well"


def test_a_command_that_was_refused_does_not_hold_the_folder_once_the_first_was_killed(tmp_path: Path) -> None:
    """It may live on, as a notebook does, and is then the one that resumes."""
    folder = OutputFolder(str(tmp_path / "out"))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        owner = {"host": socket.gethostname(), "pid": other.pid, "start": process_start(other.pid)}
        assert Attempts(folder.store).next_attempt(owner) == 1
        for _ in range(2):
            with pytest.raises(InputError, match=f"to which process {other.pid} "), folder.claimed({"rows": 1}):
                raise AssertionError("two commands write here")
        other.kill()
    folder.check_free(resume=True)
    with folder.claimed({"rows": 1}):
        assert folder.identity() == {"rows": 1}
