"""A whole attempt in this process: what the failure rules decided is what the steps do."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lab import by_step, make_job, train
from ray import cloudpickle
from torch import nn

from raytrain.checkpoint.reader import list_checkpoints, load
from raytrain.data.rows.batches import Cursor
from raytrain.errors import RunError
from raytrain.execution import worker as module
from raytrain.execution.driver_channel import AttemptResult
from raytrain.execution.worker import Worker
from raytrain.plan.plan import Plan
from raytrain.runs.faults import Fault, read_faults, write_fault
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session
from raytrain.trainable import Trainable

ROWS = 90
"""Of 3 columns; 81 train: with batches of 16 an epoch ends inside a run of 6 steps."""
OWNER = {"host": "h", "pid": 1, "start": 5}
LOSS = nn.functional.cross_entropy


class Attempts:
    """Attempts of one run on a CSV file.

    Attributes:
        sizes, dtypes: rows of each forward pass of the last attempt in training, and the formats of the outputs.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        draw = np.random.default_rng(0)
        rows = [(*row, int(sum(row) > 0)) for row in draw.normal(size=(ROWS, 3)).round(4).tolist()]
        self.data = {"source": "csv", "path": str(folder / "rows.csv"), "label": "y"}
        lines = ["a,b,c,y", *(",".join(map(str, row)) for row in rows)]
        (folder / "rows.csv").write_text("\n".join(lines))
        self.run = RunFolder.create(str(folder), "run")
        self.run.next_attempt(OWNER)
        self.sizes: list[int] = []
        self.dtypes: set[torch.dtype] = set()
        monkeypatch.setattr(module, "on_stop_request", lambda _channel, _then: None)

    def job(self, **sections: Any) -> Any:
        """Six steps, saved after each third. The module notes how many rows it is given."""
        torch.manual_seed(1)
        net, sizes, dtypes = nn.Linear(3, 2), self.sizes, self.dtypes

        def loss(net: nn.Module, batch: Any) -> torch.Tensor:
            if torch.is_grad_enabled():
                sizes.append(len(batch["x"]))
            made = net(batch["x"])
            dtypes.add(made.dtype)
            return LOSS(made, batch["labels"])

        given = {"module": Trainable.from_module(net, loss=loss)}
        sections = {"save": {"every": 3}, **sections, "loop": {"max_steps": 6, **sections.get("loop", {})}}
        job, _ = make_job(given, self.data, run=self.run, **sections)
        job.owner.update(OWNER)
        return job

    def attempt(self, **sections: Any) -> tuple[AttemptResult, Session]:
        """The next attempt, from its number to the export."""
        self.sizes.clear()
        self.dtypes.clear()
        channel = SimpleNamespace(report_progress=SimpleNamespace(remote=lambda _progress: None))
        worker = Worker(self.job(**sections), workers=Workers(), local_rank=0, channel=channel)
        result = worker.run(None)
        assert result is not None and worker.session is not None
        return result, worker.session

    def failed(self, **fields: Any) -> None:
        """The newest attempt has failed like this."""
        known = {"step": 4, "error": "RuntimeError", "message": "it broke", "traceback": "t", "precision": "fp32"}
        known |= {"rank": 0, "reduced": False, "final": False, "from_step": 0, "time": time.time(), **fields}
        write_fault(self.run, Fault(attempt=self.run.current_attempt(), **known))

    def losses(self) -> dict[int, float]:
        """Of the steps after the first checkpoint."""
        rows = self.run.read_rows(self.run.metrics)
        return {row["step"]: row["loss"] for row in rows if row["kind"] == "train" and row["step"] > 3}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.run.read_rows(self.run.events) if row["kind"] == kind]


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(tmp_path, monkeypatch)


def plain_losses(attempts: Attempts, step: int, cursor: Cursor | None) -> dict[int, float]:
    """The steps after a checkpoint, by a session that is given the cursor."""
    session = Session(attempts.job(), workers=Workers())
    session.prepare("fp32")
    session.restore(load(attempts.run.checkpoint_dir(step)))
    session.state.cursor = cursor or session.state.cursor
    rows, _ = train(session)
    session.close()
    return by_step(rows)


@pytest.mark.parametrize("skipped", [None, Cursor(0, 64), Cursor(2, 16)], ids=["none", "same epoch", "later epoch"])
def test_an_attempt_continues_with_the_rows_after_those_that_a_rollback_skipped(
    attempts: Attempts, skipped: Cursor | None
) -> None:
    result, _ = attempts.attempt()
    assert (result.status, result.steps) == ("done", 6)
    whole = attempts.losses()
    if skipped is not None:
        rolled = {"kind": "decision", "what": "rollback", "value": 3, "reason": "a test"}
        attempts.run.append_event({**rolled, "epoch": skipped.epoch, "position": skipped.position})
    attempts.run.store.delete_tree("checkpoints/step_00000006")
    attempts.failed()
    result, _ = attempts.attempt()
    assert (result.status, result.steps, attempts.events("attempt")[-1]["from_step"]) == ("done", 6, 3)
    assert attempts.losses() == plain_losses(attempts, 3, skipped)
    assert (attempts.losses() == whole) == (skipped is None)


@pytest.mark.parametrize(("had", "then"), [(16, [8, 8]), (8, [4, 4, 4, 4]), (5, [3, 3, 3, 3, 3, 1])])
def test_after_an_out_of_memory_error_the_passes_have_half_the_rows(
    attempts: Attempts, had: int, then: list[int]
) -> None:
    attempts.failed(out_of_memory=True, micro_batch=had, error="OutOfMemoryError")
    result, session = attempts.attempt(loop={"max_steps": 2})
    assert result.status == "done" and attempts.sizes[: len(then)] == then
    assert session.settings.micro_batch == then[0]


def test_the_precision_that_the_rules_raise_is_that_of_the_steps(attempts: Attempts) -> None:
    """Both of what followed from the faults: a failing half precision, and memory that had run out before."""
    attempts.failed(out_of_memory=True, micro_batch=16, error="OutOfMemoryError", step=2, precision="bf16")
    attempts.run.next_attempt(OWNER)
    attempts.failed(precision="bf16", reduced=True)
    result, session = attempts.attempt(precision={"dtype": "bf16", "fallback": True}, loop={"max_steps": 2})
    assert result.status == "done" and session.precision == "fp32"
    assert attempts.sizes == [8] * 4 and attempts.dtypes == {torch.float32}
    assert attempts.events("attempt")[-1]["precision"] == "fp32"


@pytest.mark.parametrize(("batch", "sizes"), [(16, [4, 4, 4, 4]), (32, [16])], ids=["same job", "another batch"])
def test_what_an_earlier_attempt_measured_is_used_for_the_same_settings(
    attempts: Attempts, batch: int, sizes: list[int]
) -> None:
    settings = {"global_batch_size": batch, "workers": 1, "precision": "fp32", "fp32_layers": []}
    record = {"value": 4, "reason": "measured", "settings": settings, "peak_bytes": None, "budget_bytes": None}
    attempts.run.write_json(attempts.run.memory_probe, {"micro_batch": record})
    _, session = attempts.attempt(loop={"max_steps": 1})
    assert attempts.sizes == sizes and session.settings.micro_batch == sizes[0]


def test_the_planned_interval_and_number_of_checkpoints_are_kept(attempts: Attempts) -> None:
    attempts.attempt(save={"every": 2, "keep": 1}, loop={"max_steps": 7, "eval_every": 100})
    assert [row["step"] for row in attempts.events("checkpoint")] == [2, 4, 6, 7]
    assert [info.step for info in list_checkpoints(attempts.run)] == [7]


@pytest.mark.parametrize(("per_gpu", "rank", "index"), [(1, 2, 2), (2, 2, 1), (2, 1, 1)])
def test_a_worker_with_a_part_of_a_gpu_is_on_the_one_that_ray_gave_it(
    monkeypatch: pytest.MonkeyPatch, attempts: Attempts, per_gpu: int, rank: int, index: int
) -> None:
    """Three workers and a host on two GPUs: the host has a part of the first, so the second worker is on the second."""
    job, made = attempts.job(), list[int]()
    for name in ("keep_freed_memory", "keep_parents_objects", "import_from"):
        monkeypatch.setattr(module, name, lambda *_given: None)
    monkeypatch.setattr(Plan, "per_gpu", per_gpu)
    monkeypatch.setattr(module, "Workers", lambda: SimpleNamespace(rank=rank))
    monkeypatch.setattr(module.ray.train, "get_context", lambda: SimpleNamespace(get_local_rank=lambda: rank))
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(module, "get_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(module, "kept", lambda _channel, _name: cloudpickle.dumps(job))
    for name in ("rank_log", "signs_of_life", "node_telemetry", "watched_memory"):
        monkeypatch.setattr(module, name, lambda *_given, **_more: contextlib.nullcontext())
    monkeypatch.setattr(Worker, "run", lambda worker, _data: made.append(worker.local_rank))
    module.train_loop_per_worker({"import_path": "", "run_path": job.run_path, "channel": None, "data": False})
    assert made == [index]


class StrangeError(BaseException):
    """What no handler of errors expects."""


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("half of \ud83d"), RunError), (KeyboardInterrupt(), KeyboardInterrupt),
        (StrangeError("strange"), StrangeError),
    ],
)  # fmt: skip
def test_whatever_the_users_code_raises_is_recorded_with_its_step_and_can_be_passed_on(
    error: BaseException, raised: type[BaseException], attempts: Attempts,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    class Sizes(list[int]):
        def append(self, size: int) -> None:
            if len(self) == 4:
                raise error
            super().append(size)

    attempts.sizes = Sizes()
    channel = SimpleNamespace(report_progress=SimpleNamespace(remote=lambda _progress: None))
    with pytest.raises(raised) as caught:
        Worker(attempts.job(), workers=Workers(), local_rank=0, channel=channel).run(None)
    str(caught.value).encode()
    (fault,) = read_faults(attempts.run, since=0)
    assert (fault.error, fault.step) == (type(error).__name__, 5)
    assert f"rank 0 failed at step 5: {type(error).__name__}" in capsys.readouterr().err
