"""Rollbacks and rewinds: one training state in memory, the initial weights restored, no data twice, and a limit."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import MLP, class_rows, make_job, train, train_and_save
from torch import Tensor, nn

from raytrain.checkpoint.reader import newest_valid
from raytrain.data.rows.batches import Cursor
from raytrain.errors import StateLost
from raytrain.execution.recovery import RewindPolicy, RollbackPolicy, rewind, roll_back, skipped_to
from raytrain.runs.folder import RunFolder
from raytrain.train.job import copy_of
from raytrain.train.parallel.collectives import Workers
from raytrain.train.placing import local
from raytrain.train.session import Session
from raytrain.train.state import LoopOutcome
from raytrain.trainable import LossOutput, Trainable

BAD = LoopOutcome("rollback", "3 steps in a row were not finite", 3)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(str(tmp_path), "a")


def session_of(run: RunFolder, *, model: Any = MLP, rows: int = 64, **sections: Any) -> Session:
    data = {"train": class_rows(rows), "eval_fraction": 0.0}
    job, source = make_job(model, data, run=run, **{"loop": {"max_steps": 6}, **sections})
    session = Session(job, workers=Workers(), source=source)
    session.say = lambda kind, **fields: run.append_event({"kind": kind, **fields})
    session.prepare(job.planned("precision"))
    return session


def held_bytes(session: Session) -> int:
    """Bytes of all weights, gradients and optimizer state that the session's training still holds."""

    def tensors() -> Iterator[Tensor]:
        for parameter in session.trainable.module.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from session.step.reduction.gradients.payloads
        for optimizer in session.optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    return sum(local(tensor).untyped_storage().nbytes() for tensor in tensors())


@pytest.mark.parametrize(
    ("way", "strategy"), [("roll back", "data_parallel"), ("rewind", "data_parallel"), ("roll back", "fsdp")]
)
def test_going_back_holds_one_training_state(
    run: RunFolder, way: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(run, scale={"strategy": strategy})
    train_and_save(session, run, every=5)
    assert held_bytes(session) > 0
    seen: list[int] = []
    built = Session.prepare

    def prepare(self: Session, precision: str) -> None:
        seen.append(held_bytes(session))
        built(self, precision)

    monkeypatch.setattr(Session, "prepare", prepare)
    if way == "roll back":
        fresh, _ = roll_back(session, run, outcome=BAD)
    else:
        fresh, _ = RewindPolicy(run, limit=3).recover(session, StateLost("a host died"))
    assert seen == [0]
    assert fresh.state.step == 6 and held_bytes(fresh) > 0
    session.release()  # a second call does nothing


def given() -> tuple[nn.Linear, Trainable]:
    torch.manual_seed(0)
    module = nn.Linear(12, 4)
    loss = nn.functional.cross_entropy
    return module, Trainable.from_module(module, loss=lambda mod, batch: loss(mod(batch["x"]), batch["labels"]))


def test_a_given_module_starts_again_if_there_is_no_checkpoint(run: RunFolder) -> None:
    module, trainable = given()
    before = module.weight.detach().clone()
    session = session_of(run, model={"module": trainable})
    train(session)
    assert not torch.equal(session.trainable.module.weight, before), "it has trained"
    fresh, decision = roll_back(session, run, outcome=BAD)
    assert decision["value"] == 0 and torch.equal(fresh.trainable.module.weight, before)
    assert torch.equal(module.weight, before), "the given object is unchanged"


def test_a_copy_of_a_trainable_has_its_hooks_on_the_copy() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("seen", torch.zeros(()))

    def own(batch: Any, part: nn.Module = module) -> LossOutput:
        return LossOutput(part.weight.sum())

    made = copy_of(
        Trainable(
            module=module, loss=lambda _module, batch: own(batch), log_metrics=lambda: {"seen": module.seen}, weight=len
        )
    )
    assert made.module is not module and made.weight is len
    with torch.no_grad():
        made.module.weight.fill_(1.0)
        made.module.seen.fill_(5.0)
    assert made.log_metrics()["seen"].item() == 5.0 and made.loss(made.module, {}).loss.item() == 4.0
    assert module.seen.item() == 0.0


def test_a_rewind_reads_the_initial_weights_only_where_no_checkpoint_follows(run: RunFolder, tmp_path: Path) -> None:
    source = RunFolder.create(str(tmp_path), "before")
    train_and_save(session_of(source, seed=5), source, every=6)
    start = shutil.copytree(source.checkpoint_dir(6), tmp_path / "start")
    init = {"model": {**MLP, "init_from": str(start)}}
    session = session_of(run, **init)
    weights = [p.detach().clone() for p in session.trainable.module.parameters()]
    train(session)
    fresh, decision = rewind(session, run, reason="a host died")
    assert decision["value"] == 0
    again = [p.detach() for p in fresh.trainable.module.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(weights, again, strict=True)), "from init_from"
    train_and_save(fresh, run, every=3)
    shutil.rmtree(start)
    fresh, decision = rewind(fresh, run, reason="another died")
    assert decision["value"] == 6 == fresh.state.step


def never_finite(session: Session) -> Session:
    inner = session.step.forward

    def forward(batch: Any, **more: Any) -> Any:
        out = inner(batch, **more)
        return LossOutput(out.loss * math.nan)

    session.step.forward = forward
    return session


def test_a_run_that_is_never_finite_ends_after_one_rollback_per_precision(run: RunFolder) -> None:
    session = session_of(run, precision={"dtype": "bf16"}, loop={"max_steps": 30})
    policy = RollbackPolicy(run, limit=5)
    precisions = []
    while True:
        _, outcome = train(never_finite(session))
        assert outcome.kind == "rollback"
        recovered = policy.recover(session, outcome)
        if isinstance(recovered, LoopOutcome):
            break
        session = recovered
        precisions.append(session.precision)
    assert precisions == ["fp32"], "different data and the higher precision at once; then nothing is left to try"
    assert (
        recovered.kind == "failed"
        and "optim.lr" in recovered.reason
        and "fp32 is not raised any further" in recovered.reason
    )


def test_good_steps_in_between_allow_another_rollback_within_the_limit(run: RunFolder) -> None:
    policy = RollbackPolicy(run, limit=2)
    session = session_of(run, loop={"max_steps": 30})
    for _ in range(2):
        session.state.step = 9  # of which the last three were not finite
        recovered = policy.recover(session, BAD)
        assert isinstance(recovered, Session)
        session = recovered
    session.state.step = 9
    recovered = policy.recover(session, BAD)
    assert isinstance(recovered, LoopOutcome) and "after 2 rollbacks (retry.rollbacks)" in recovered.reason


def test_the_skipped_span_stays_skipped_after_any_resume(run: RunFolder) -> None:
    session = session_of(run, rows=640, loop={"max_steps": 8})
    train_and_save(session, run, every=5)
    shutil.rmtree(run.checkpoint_dir(8))
    saved = newest_valid(run).checkpoint
    assert saved is not None and saved.step == 5 and saved.state["loop"]["cursor"]["position"] == 80
    fresh, decision = roll_back(session, run, outcome=BAD)
    assert (decision["value"], decision["epoch"], decision["position"]) == (5, 0, 128)
    assert fresh.state.cursor == Cursor(0, 128)
    assert skipped_to(run.read_rows(run.events), 5) == Cursor(0, 128), "another attempt continues from there"
    again, _ = rewind(fresh, run, reason="a host died")
    assert (again.state.step, again.state.cursor) == (5, Cursor(0, 128))


def test_a_rollback_decision_is_recorded_before_the_session_is_built(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(run)

    def no_memory(*_arguments: Any, **_more: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(Session, "prepare", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        roll_back(session, run, outcome=BAD)
    (row,) = [row for row in run.read_rows(run.events) if row["kind"] == "decision"]
    assert (row["what"], row["value"], row["precision"]) == ("rollback", 0, "fp32")


@pytest.mark.parametrize(
    ("rows", "step", "position"),
    [
        ([], 0, None),
        (["r8:128"], 8, 128),
        (["r8:128"], 0, None),
        (["r8:128", "r8:200"], 8, 200),
        (["r8:128", "a8"], 8, 128),
        (["r8:128", "a4"], 8, None),
        (["r8:128", "w4"], 8, None),
        (["r8:128", "r4:300"], 8, None),
        (["r0:48", "a0"], 0, 48),
    ],
)
def test_which_roll_back_is_in_force(rows: list[str], step: int, position: int | None) -> None:
    def row(text: str) -> dict[str, Any]:
        value, _, where = text[1:].partition(":")
        if text[0] == "a":
            return {"kind": "attempt", "attempt": 2, "from_step": int(value)}
        what = {"r": "rollback", "w": "rewind"}[text[0]]
        at = {"epoch": 0, "position": int(where)} if where else {}
        return {"kind": "decision", "what": what, "value": int(value), **at}

    events = [json.loads(json.dumps(row(text))) for text in rows]
    assert skipped_to(events, step) == (None if position is None else Cursor(0, position))


def micro_batches(session: Session) -> list[int]:
    """The sizes of the micro-batches that a session trains with from here, in order."""
    sizes, inner = [], session.step.forward

    def forward(batch: Any, **more: Any) -> Any:
        if session.trainable.module.training:
            sizes.append(len(batch["labels"]))
        return inner(batch, **more)

    session.step.forward = forward
    train(session)
    return sizes


@pytest.mark.parametrize("way", ["roll back", "rewind"])
def test_a_smaller_micro_batch_is_kept_when_the_run_goes_back(run: RunFolder, way: str) -> None:
    """Memory that ran out before would run out again."""
    session = session_of(run, rows=96, loop={"max_steps": 4, "global_batch_size": 8, "micro_batch_size": 8})
    inner, calls = session.step.forward, []

    def forward(batch: Any, **more: Any) -> Any:
        calls.append(len(batch["labels"]))
        if len(calls) == 1:
            raise torch.OutOfMemoryError("planted")
        return inner(batch, **more)

    session.step.forward = forward
    train(session)
    assert calls[:3] == [8, 4, 4]
    if way == "roll back":
        fresh, _ = roll_back(session, run, outcome=BAD)
    else:
        fresh, _ = rewind(session, run, reason="a host died")
    assert fresh.state.step == 0 and set(micro_batches(fresh)) == {4}


def bad_in(steps: set[int], session: Session) -> Session:
    """A session in which these steps are not finite."""
    inner = session.step.forward

    def forward(batch: Any, **more: Any) -> Any:
        out = inner(batch, **more)
        return LossOutput(out.loss * (math.nan if session.state.step + 1 in steps else 1.0))

    session.step.forward = forward
    return session


@pytest.mark.parametrize("log_every", [1, 10])
@pytest.mark.parametrize(
    ("steps", "kind", "at"),
    [({4, 5}, "done", 20), ({4, 5, 7, 8}, "done", 20), ({4, 5, 6}, "rollback", 6), ({3, 4, 6, 7, 8}, "rollback", 8)],
)
def test_exactly_three_steps_in_a_row_that_are_not_finite_end_the_loop(
    run: RunFolder, steps: set[int], kind: str, at: int, log_every: int
) -> None:
    session = bad_in(steps, session_of(run, loop={"max_steps": 20, "log_every": log_every}))
    _, outcome = train(session)
    assert outcome.kind == kind and (kind == "done" or outcome.bad_steps == 3)
    late = 2 if kind != "done" and log_every > 1 else 0  # without a row in between, noticed two steps later
    assert session.state.step == at + late
