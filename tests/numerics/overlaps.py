"""Runs with and without overlap, for processes of a gang; they return numbers, never tensors."""

from __future__ import annotations

import gc
from typing import Any

import torch
from lab import GPT, MOE, class_rows, digest, make_session, optimizer_state, token_rows, train
from shortages import Planted
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import raytrain.train.parallel.reduction
from raytrain.errors import CollectiveFailed
from raytrain.plan.shares import Shares
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


# ---------------------------------------------------------------- settings


def kept(_rank: int, _world: int) -> dict[str, bool]:
    """Whether a session prepared again, as after a rollback, overlaps; and one with collectives inside backward."""
    again = session_of(True)
    again.prepare("fp64")
    normed = session_of(True, model={"builder": "overlaps:normed"}, data=CLASSES, scale={"sync_batchnorm": True})
    normed.step.reduction.overlap(True)
    return {"again": sums(again).overlaps, "batch norm": sums(normed).overlaps}


def sums(session: Session) -> BucketSums:
    return session.step.reduction.sums  # pyright: ignore[reportAttributeAccessIssue]


def normed() -> nn.Module:
    """A builder with a layer that communicates with the other workers in its passes."""
    model = Twice()
    model.norm = nn.BatchNorm1d(4)  # pyright: ignore[reportAttributeAccessIssue]
    return model


CLASSES = {"train": class_rows(ROWS), "eval_fraction": 0.0}
