"""The claim on an output folder: one command writes, however many are refused meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.errors import InputError
from raytrain.infer.output import OutputFolder


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
