"""What is checked before a run begins or continues."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobs.driver import run_folder
from jobs.job.spec import load_spec
from raytrain.plan.choice import Resolved
from raytrain.runs.folder import RunFolder

JOB = {"model": {"builder": "raytrain.models.mlp:mlp"}, "data": {"source": "text", "path": "input.txt"}}


@pytest.mark.parametrize(("complete", "saved"), [(None, 0), ((), 0), ((10, 20), 2)])
def test_checkpoints_that_a_run_has_need_no_room(
    complete: tuple[int, ...] | None, saved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = None if complete is None else RunFolder.create(str(tmp_path), "a")
    for step in complete or ():
        assert run is not None
        run.write_text(f"checkpoints/step_{step:08d}/COMPLETE", "")
    if run is not None:
        run.write_text("checkpoints/step_00000030/model.safetensors", "its write did not end")
    given: dict[str, Any] = {}
    monkeypatch.setattr(run_folder, "run_preflight", lambda **kwargs: given.update(kwargs) or [])
    plan: Any = SimpleNamespace(
        workers=Resolved(2, ""), device=Resolved("cpu", ""), memory=Resolved(None, ""),
        checkpoint_bytes=Resolved(1 << 20, ""),
    )  # fmt: skip
    spec = load_spec(mapping=JOB).spec
    run_folder._checked(spec, plan, cast(Any, SimpleNamespace(nodes=[1])), run=run)
    assert (given["saved"], given["checkpoint_bytes"]) == (saved, 1 << 20)
