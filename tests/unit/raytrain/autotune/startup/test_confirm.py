"""What a search had found, held against the real run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.autotune.startup.confirm import _write
from raytrain.runs.folder import RunFolder


@pytest.mark.parametrize("confirmed", [True, False])
def test_the_terminal_is_told_where_a_run_differs_from_its_search(
    confirmed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session: Any = SimpleNamespace(workers=SimpleNamespace(rank=0))
    reporter: Any = SimpleNamespace(event=lambda *_, **__: None)
    run = RunFolder(str(tmp_path))
    _write(session, run, {"confirmed": confirmed}, reporter, value=2, reason="a step takes 9 ms, the search found 1 ms")
    assert ("unlike the search: a step takes 9 ms" in capsys.readouterr().out) is not confirmed
