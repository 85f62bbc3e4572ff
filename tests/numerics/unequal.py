"""What the processes of a gang with unequal shares do. Each function is `(rank, world, ...)`, and returns numbers."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from lab import GPT, Rows, by_step, digest, make_session, optimizer_state, token_rows, train, train_and_save, weights_of
from torch import nn

from raytrain.autotune import startup
from raytrain.autotune.startup import Calibration, settle_shares
from raytrain.checkpoint.reader import load
from raytrain.plan.shares import Shares, shares_of
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session

ROWS, GLOBAL, MICRO = 54, 16, 2
SLOWNESS = 12


def session_of(
    *, precision: str, steps: int, shares: dict[str, Any] | None, dropout: float = 0.0, run: RunFolder | None = None
) -> Session:
    """A GPT on 54 rows with ragged labels: windows of 16, the fourth with 6. `shares`: as measured before."""
    workers = Workers()
    session = make_session(
        {**GPT, "dropout": dropout},
        {"train": token_rows(ROWS, ragged=True, empty=range(3)), "eval": token_rows(21, seed=5)},
        workers=workers,
        precision=precision,
        loop={"max_steps": steps, "global_batch_size": GLOBAL, "micro_batch_size": MICRO, "eval_every": 7},
        optim={"max_grad_norm": 0.3},
        scale={"shares": "auto"},
        run=run,
    )
    if shares is not None:
        session.use(replace(session.settings, shares=shares_of(shares)))
    return session


def steps_taken(rank: int, world_size: int, shares: dict[str, Any] | None, steps: int) -> dict[str, Any]:
    """Losses, norms, evaluations and weights after AdamW steps in float64."""
    session = session_of(precision="fp64", steps=steps, shares=shares)
    indices = session.loader.global_batch(session.state.cursor).indices
    reporter, _ = train(session)
    return {
        "rows": [len(own) for own in session.loader.batches.rank_indices(indices)],
        "losses": reporter.losses,
        "norms": reporter.of("train", "grad_norm"),
        "evals": reporter.of("eval", "loss"),
        "weights": weights_of(session),
        "digest": digest(session.trainable.module.state_dict()),
    }


def life(rank: int, world_size: int, orders: dict[str, Any]) -> dict[str, Any]:
    """One attempt with dropout and a checkpoint every 3 steps. Orders: run (folder), shares, steps, resume (a step)."""
    run = RunFolder(orders["run"])
    session = session_of(precision="fp32", steps=orders["steps"], shares=orders["shares"], dropout=0.1)
    if orders.get("resume"):
        session.restore(load(run.checkpoint_dir(orders["resume"])))
    seen: dict[int, list[int]] = {}
    inner = session.loader.micro_batches

    def watched(indices: Any) -> Any:
        mine = session.loader.batches.rank_indices(indices)
        seen[session.state.step + 1] = [int(row) for rows in mine for row in rows]
        return inner(indices)

    session.loader.micro_batches = watched  # type: ignore[method-assign]
    reporter, _ = train_and_save(session, run, every=3, asynchronous=False)
    return {
        "losses": by_step(reporter),
        "rows": seen,
        "digest": digest(session.trainable.module.state_dict(), optimizer_state(session)),
    }


def measured(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Shares measured where the last rank computes everything many times; then found again by a second attempt."""
    run = RunFolder(folder)
    if rank == 0:
        os.makedirs(folder, exist_ok=True)
    session = session_of(precision="fp32", steps=4, shares=None, dropout=0.1, run=run)
    if rank == world_size - 1:
        _slow_down(session)
    before = everything(session)
    reporter = Rows()
    settle_shares(Calibration(session, run, reporter, _no_driver))
    after = everything(session)
    again = session_of(precision="fp32", steps=4, shares=None, run=run)
    startup.measure_shares = _not_again
    settle_shares(Calibration(again, run, reporter, _no_driver))
    batches = session.loader.batches
    shares = batches.shares
    spans = [] if shares is None else shares.spans(batches.global_batch_size, micro_batch=batches.micro_batch)
    return {
        "untouched": before == after,
        "rows": [len(span) for span in spans],
        "same": shares == again.loader.batches.shares and isinstance(shares, Shares),
        "events": reporter.events,
        "record": run.read_json(run.memory_probe)["shares"] if rank == 0 else None,
    }


def everything(session: Session) -> str:
    """A hash of what a run consists of."""
    cursor = [session.state.cursor.epoch, session.state.cursor.position]
    module = session.trainable.module
    return digest(module.state_dict(), optimizer_state(session), session.generator_state(), cursor)


def _slow_down(session: Session) -> None:
    """This worker's forward and backward are computed many times over, without a trace."""
    inner = session.trainable.loss

    def loss(module: nn.Module, batch: dict[str, Any]) -> Any:
        for _ in range(SLOWNESS):
            inner(module, batch)
        return inner(module, batch)

    session.trainable.loss = loss


def _no_driver(status: dict[str, Any]) -> None:
    """No driver listens."""


def _not_again(session: Session, sizes: list[int]) -> Any:
    raise AssertionError(f"measured once more, {sizes}")
