"""Runs with and without overlap, for processes of a gang; they return numbers, never tensors."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from typing import Any

import torch
from lab import GPT, MOE, Rows, class_rows, digest, make_session, optimizer_state, token_rows, train
from shortages import Planted
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from unequal import everything

import raytrain.train.parallel.reduction
from raytrain.autotune.startup import Calibration, read_measured, settle_overlap
from raytrain.errors import CollectiveFailed
from raytrain.plan.choice import Deferred
from raytrain.plan.shares import Shares
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.reduction import BucketSums
from raytrain.train.session import Session

ROWS, STEPS = 54, 9
"""Windows of 16 rows in micro-batches of 2; the fourth has 6, of which two workers have two passes and one."""
BUCKET = 4096
EXPERTS = {"num_experts": 4, "top_k": 2, "hosts": 0}


def session_of(
    overlap: bool, *, bucket: int = BUCKET, shares: dict[str, Any] | None = None, **sections: Any
) -> Session:
    """A session with buckets of this size, overlapping or not."""
    raytrain.train.parallel.reduction.CPU_BUCKET_BYTES = bucket
    given = {"model": GPT, "precision": "fp64", **sections}
    model = given.pop("model")
    tokens = {"train": token_rows(ROWS, ragged=True, empty=range(3)), "eval": token_rows(9, seed=5)}
    data = given.pop("data", tokens)
    loop = {"max_steps": STEPS, "micro_batch_size": 2, "grow_after": 1, "eval_every": 1000, **given.pop("loop", {})}
    scale = {"overlap": overlap, **given.pop("scale", {})}
    session = make_session(model, data, loop=loop, scale=scale, optim={"max_grad_norm": 0.3}, **given)
    if shares is not None:
        session.loader.batches.shares = Shares.from_json(shares)
    return session


class Seen:
    """Which buckets a worker started in which step, and how many of them inside a backward."""

    def __init__(self, session: Session) -> None:
        self.order: list[list[int]] = [[]]
        self.inside: list[int] = [0]
        self._sums = sums(session)
        self._inner = self._sums._start
        self._sums._start = self._begin  # type: ignore[method-assign]

    def _begin(self, bucket: int) -> None:
        self.order[-1].append(bucket)
        self.inside[-1] += self._sums._open
        self._inner(bucket)
        if len(self.order[-1]) == len(self._sums._missing):
            self.order.append([])
            self.inside.append(0)


def found(session: Session) -> dict[str, Any]:
    """Train; the numbers of it, and what started when."""
    seen = Seen(session)
    rows, outcome = train(session)
    return {
        "losses": rows.losses,
        "norms": rows.of("train", "grad_norm"),
        "scales": rows.of("train", "loss_scale"),
        "skipped": rows.of("train", "skipped_steps"),
        "digest": digest(session.trainable.module.state_dict(), optimizer_state(session), session.generator_state()),
        "model": digest(session.trainable.module.state_dict()),
        "outcome": outcome.kind,
        "events": [event for event in rows.events if event["kind"] == "out_of_memory"],
        "overlaps": sums(session).overlaps,
        "order": seen.order[:-1],
        "inside": seen.inside[:-1],
    }


def both(_rank: int, _world: int, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each case without overlap and with it."""
    return {
        name: {"without": found(session_of(False, **sections)), "with": found(session_of(True, **sections))}
        for name, sections in cases.items()
    }


# ---------------------------------------------------------------- what goes wrong


def short(rank: int, _world: int, planted: list[Any]) -> dict[str, dict[str, Any]]:
    """Runs with shortages in forwards and backwards, one of them when buckets are on their way already."""
    made = {}
    for name, overlap in (("without", False), ("with", True)):
        session = session_of(overlap)
        mine = Planted(session, [place for place in planted if place[2] == rank])
        made[name] = {**found(session), "met": mine.met}
    session = session_of(True)
    late = AtTheEnd(session) if rank == 1 else None
    made["at the end"] = {**found(session), "met": late.met if late else 0}
    return made


class AtTheEnd:
    """In the backward of its third step the worker runs out of memory, after its second-last bucket was started."""

    def __init__(self, session: Session) -> None:
        self.met, self._session = 0, session
        self._first = next(iter(session.trainable.module.parameters()))
        self._first.register_hook(self._fail)
        self._last = session.step.reduction.last_pass
        self._is_last = False
        session.step.reduction.last_pass = self._told  # type: ignore[method-assign]

    def _told(self) -> None:
        self._is_last = True
        self._last()

    def _fail(self, gradient: Tensor) -> None:
        last, self._is_last = self._is_last, False
        if last and self._session.state.step == 2 and not self.met:
            self.met = len(sums(self._session)._pending)
            raise torch.OutOfMemoryError("planted in the first layer's gradient")


def broken(rank: int, _world: int) -> str:
    """The second worker fails in the middle of a backward, with reductions in flight; returns the error of each."""
    session: Session | None = session_of(True)

    def fail(gradient: Tensor) -> None:
        if rank == 1 and session is not None and session.state.step == 3:
            raise ValueError("planted")

    next(iter(session.trainable.module.parameters())).register_hook(fail)
    said = "nothing"
    try:
        train(session)
    except (ValueError, CollectiveFailed) as error:
        said = type(error).__name__
    session = None
    gc.collect()
    torch.distributed.destroy_process_group()  # as a worker that ends does
    return said


class Twice(nn.Module):
    """One linear layer in two reentrant checkpoints, each with its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 64)
        self.shared = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).relu()
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True).relu()  # type: ignore[union-attr]
        logits = self.last(hidden)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss} if self.training else {"loss": loss, "logits": logits}


def twice() -> nn.Module:
    """The builder."""
    return Twice()


MOE_CASE = {"model": MOE, "experts": EXPERTS}
TWICE_CASE = {"model": {"builder": "overlaps:twice"}, "data": {"train": class_rows(ROWS), "eval_fraction": 0.0}}


# ---------------------------------------------------------------- auto


def settled(rank: int, _world: int, folder: str) -> dict[str, Any]:
    """Measured at a start; found again by the next attempt, whichever it was; and where nothing can be measured."""
    run = RunFolder(folder)
    said: list[Any] = []
    session = session_of(True)
    defer(session)
    before = everything(session)
    overlapped = sums(session).overlaps
    reporter = Rows()
    settle_overlap(Calibration(session, run, reporter, said.append))
    untouched = before == everything(session)
    value, chosen = sums(session).overlaps, session.settings.overlap
    session.workers.all_reduce_ints([0])  # rank 0 has written the record
    reason = read_measured(run)["overlap"]["reason"]
    again = session_of(True)
    defer(again)
    settle_overlap(Calibration(again, run, reporter, said.append))
    session.workers.all_reduce_ints([0])
    if rank == 0:
        run.write_json(run.memory_probe, {"overlap": {"value": True, "reason": "given"}})
    session.workers.all_reduce_ints([0])
    other = session_of(False)
    defer(other)
    settle_overlap(Calibration(other, run, reporter, said.append))
    told = {"other": (sums(other).overlaps, other.settings.overlap)}
    other.prepare("fp64")
    assert sums(other).overlaps, "a session prepared again, as after a rollback, keeps it"
    return {
        "untouched": untouched, "before": overlapped, "taken": chosen, "value": value, "reason": reason,
        "again": sums(again).overlaps, "said": len(said), "single": refused(f"{folder}/single", rank, bucket=1 << 30),
        "batch norm": refused(f"{folder}/norm", rank, model={"builder": "overlaps:normed"}, data=CLASSES,
                              scale={"sync_batchnorm": True}), **told,
    }  # fmt: skip


def refused(folder: str, rank: int, **sections: Any) -> str:
    """Why overlap is not even measured."""
    os.makedirs(folder, exist_ok=True)
    session = session_of(True, **sections)
    defer(session)
    settle_overlap(Calibration(session, run := RunFolder(folder), Rows(), _unheard))
    assert not sums(session).overlaps
    session.workers.all_reduce_ints([0])  # rank 0 has written the record
    return read_measured(run)["overlap"]["reason"]


def defer(session: Session) -> None:
    """As a plan with `auto` leaves it."""
    session.job = replace(session.job, plan=replace(session.job.plan, overlap=Deferred("measured", (False, True))))
    session.step.reduction.overlap(False)


def sums(session: Session) -> BucketSums:
    return session.step.reduction.sums  # pyright: ignore[reportAttributeAccessIssue]


def normed() -> nn.Module:
    """A builder with a layer that communicates with the other workers in its passes."""
    model = Twice()
    model.norm = nn.BatchNorm1d(4)  # pyright: ignore[reportAttributeAccessIssue]
    return model


def _unheard(_status: dict[str, Any]) -> None:
    return None


CLASSES = {"train": class_rows(ROWS), "eval_fraction": 0.0}
