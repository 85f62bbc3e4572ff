"""What the processes of a gang do. Each function is `(rank, world, ...)` and returns numbers, never tensors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lab import (
    GPT,
    MLP,
    MOE,
    Rows,
    by_step,
    class_rows,
    digest,
    make_session,
    optimizer_state,
    saver_of,
    token_rows,
    train,
    weights_of,
)
from torch import nn
from torch.nn import functional as F

from raytrain.checkpoint.reader import load, newest_valid
from raytrain.data.rows.batches import Cursor
from raytrain.execution.checkpointer import CheckpointSaver
from raytrain.plan.batch import EVAL_MICRO_BATCHES
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session
from raytrain.trainable import LossOutput, MicroBatch, Trainable

# ---------------------------------------------------- ARCHITECTURE.md, 2: one step, however it is shared out


def split_models() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Name -> (model, training rows). 54 rows in windows of 16: the fourth has 6, in micro-batches of 4 and 2.

    The labels are ragged, and rows 0 to 9 have none at all, so that whole micro-batches weigh nothing.
    """
    tokens = token_rows(54, ragged=True, empty=range(10))
    experts = {"num_experts": 4, "top_k": 2, "hosts": 0}
    return {
        "gpt": ({"model": GPT}, tokens),
        "moe_gpt": ({"model": MOE, "experts": experts}, tokens),
        "mlp": ({"model": MLP}, class_rows(54)),
    }


def split_run(
    rank: int, world_size: int, name: str, micro: int, steps: int, optimizer: str = "adamw"
) -> dict[str, Any]:
    """Losses, norms and weights after `steps` steps in float64, as this worker has them."""
    made, rows = split_models()[name]
    session = make_session(
        made["model"],
        {"train": rows, "eval_fraction": 0.0},
        precision="fp64",
        loop={"max_steps": steps, "micro_batch_size": micro},
        optim={"max_grad_norm": 0.3, "name": optimizer},
        **{key: value for key, value in made.items() if key != "model"},
    )
    shares: list[tuple[int, int]] = []
    inner = session.loader.micro_batches

    def counted(indices: np.ndarray) -> Iterator[MicroBatch]:
        micros = list(inner(indices))
        shares.append((len(micros), sum(micro.weight == 0 for micro in micros)))
        yield from micros

    session.loader.micro_batches = counted  # type: ignore[method-assign]
    reporter, _ = train(session)
    return {
        "losses": reporter.losses,
        "aux": reporter.of("train", "aux_loss"),
        "norms": reporter.of("train", "grad_norm"),
        "weights": weights_of(session),
        "micro_batches": [count for count, _ in shares],
        "empty": sum(empty for _, empty in shares),
        "digest": digest(session.trainable.module.state_dict()),
    }


def split_runs(rank: int, world_size: int, names: list[str], micro: int, steps: int) -> dict[str, Any]:
    """`split_run` of several models in one process."""
    return {name: split_run(rank, world_size, name, micro, steps) for name in names}


def data_parallel(rank: int, world_size: int) -> dict[str, Any]:
    """PAR-01 in float32: the reduced gradient and single-process gradients; weights after 50 steps."""
    session = make_session(
        GPT,
        {"train": token_rows(160), "eval_fraction": 0.0},
        loop={"max_steps": 50, "global_batch_size": 16, "micro_batch_size": 8},
        prepare=False,
    )
    with torch.no_grad():  # like a builder that uses an unseeded generator
        session.trainable.module.positions += 0.01 * rank
    session.prepare("fp32")
    step, indices = session.step, session.loader.global_batch(Cursor()).indices
    single = []
    for part in np.split(indices, world_size):
        micro = session.loader.one(part)
        step.backward([micro], global_weight=micro.weight)
        single.append([flat.clone() for flat in step.gradients.buffers])
    mine = list(session.loader.micro_batches(indices))
    step.backward(mine, global_weight=session.loader.global_weight(indices) or 0)
    local = [flat.clone() for flat in step.gradients.buffers]
    session.workers.all_reduce(step.gradients.buffers)
    means = [torch.stack(parts).mean(0) for parts in zip(*single, strict=True)]
    gaps = [float((a - b).abs().max()) for a, b in zip(step.gradients.buffers, means, strict=True)]
    alone = [float((a - b).abs().max()) for a, b in zip(local, means, strict=True)]
    reporter, _ = train(session)
    return {
        "gap": max(gaps),
        "gap_without_reduction": max(alone),
        "size": max(float(mean.abs().max()) for mean in means),
        "micro_batches": len(mine),
        "effective_batch": session.job.planned("effective_batch"),
        "losses": reporter.losses,
        "digest": digest(session.trainable.module.state_dict(), optimizer_state(session)),
    }


# ---------------------------------------------------------------- ARCHITECTURE.md, 3: lives of a run


def life_session(precision: str, *, steps: int = 24, optimizer: str = "adamw") -> Session:
    """A GPT with dropout on 70 rows, windows of 12, micro-batches of 2: six steps an epoch, the last with 10 rows."""
    return make_session(
        {**GPT, "dropout": 0.1},
        {"train": token_rows(70, ragged=True), "eval": token_rows(20, seed=5)},
        precision=precision,
        loop={"max_steps": steps, "global_batch_size": 12, "micro_batch_size": 2, "eval_every": 5},
        optim={"warmup_steps": 4, "max_grad_norm": 0.5, "name": optimizer},
    )


def life(rank: int, world_size: int, orders: dict[str, Any]) -> dict[str, Any]:
    """One attempt of a run.

    `orders`: run (folder), precision, optimizer, every (steps between checkpoints; None saves nothing),
    resume ("newest", a step, or None), kill_at (SIGKILL in this step, between two micro-batches), overflow_at (an
    infinite loss in this step, on overflow_rank).
    """
    session = life_session(orders["precision"], optimizer=orders.get("optimizer", "adamw"))
    run = RunFolder(orders["run"])
    loaded = None
    if orders.get("resume") == "newest":
        loaded = newest_valid(run).checkpoint
    elif orders.get("resume") is not None:
        loaded = load(run.checkpoint_dir(orders["resume"]))
    if loaded is not None:
        session.restore(loaded)
    begin = {"step": session.state.step, "scale": float(session.step.scale.value)}
    seen = _watch_rows(session, kill_at=orders.get("kill_at"))
    if orders.get("overflow_at") and rank == orders["overflow_rank"]:
        _overflow(session, at=orders["overflow_at"])
    reporter, outcome, saver = _trained(session, run, every=orders.get("every"))
    if saver is not None:
        saver.close()
    return {
        "from_step": begin["step"],
        "from_scale": begin["scale"],
        "outcome": outcome.kind,
        "losses": by_step(reporter),
        "norms": by_step(reporter, "grad_norm"),
        "evals": by_step(reporter, kind="eval"),
        "scales": by_step(reporter, "loss_scale"),
        "rows": seen,
        "parts": {} if loaded is None else {name: sorted(part) for name, part in loaded.parts.items()},
        "digest": digest(session.trainable.module.state_dict(), optimizer_state(session)),
        "generators": digest(session.generator_state()),
    }


def lives(rank: int, world_size: int, several: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several attempts in one process, one after the other."""
    return [life(rank, world_size, orders) for orders in several]


def _trained(session: Session, run: RunFolder, *, every: int | None) -> tuple[Any, Any, CheckpointSaver | None]:
    reporter = Rows()
    loop = session.loop(reporter=reporter, should_stop=lambda: False)
    saver = None
    if every is not None:
        loop.saver = saver = saver_of(session, run, every=every, reporter=reporter, clock=loop.clock)
    return reporter, loop.run(session.state), saver


def _watch_rows(session: Session, *, kill_at: int | None) -> dict[int, list[int]]:
    """Step -> the rows this worker trained on; at `kill_at` the process is killed after its first micro-batch."""
    seen: dict[int, list[int]] = {}
    inner = session.loader.micro_batches

    def watched(indices: np.ndarray) -> Iterator[MicroBatch]:
        step = session.state.step + 1
        mine = session.loader.batches.rank_indices(indices)
        for number, (rows, micro) in enumerate(zip(mine, inner(indices), strict=True)):
            if step == kill_at and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.setdefault(step, []).extend(int(row) for row in rows)
            yield micro

    session.loader.micro_batches = watched  # type: ignore[method-assign]
    return seen


def _overflow(session: Session, *, at: int) -> None:
    """Make the loss of step `at` infinite on this worker."""
    inner = session.trainable.loss

    def loss(module: nn.Module, batch: dict[str, Any]) -> Any:
        out = inner(module, batch)
        if module.training and session.state.step + 1 == at:
            return type(out)(loss=out.loss * float("inf"), aux=out.aux, metrics=out.metrics)
        return out

    session.trainable.loss = loss


# ---------------------------------------------------------------- ARCHITECTURE.md, 6: something is not finite somewhere

FAULTS = ("gradient is inf", "gradient is nan", "loss is nan", "loss alone is inf", "auxiliary loss is inf")


def nonfinite(rank: int, world_size: int, several: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Six steps for each (precision, fault); at step 3 the last rank's is not finite. Returns each state."""
    return [_nonfinite(rank, world_size, precision, fault) for precision, fault in several]


def _nonfinite(rank: int, world_size: int, precision: str, fault: str) -> dict[str, Any]:
    session = make_session(
        MLP,
        {"train": class_rows(64), "eval_fraction": 0.0},
        precision=precision,
        loop={"max_steps": 6, "micro_batch_size": 4},
        optim={"max_grad_norm": 0.05, "warmup_steps": 0},
    )
    step, inner = session.step, session.trainable.loss
    seen: list[dict[str, Any]] = []

    def loss(module: nn.Module, batch: dict[str, Any]) -> Any:
        out = inner(module, batch)
        if rank != world_size - 1 or session.state.step + 1 != 3:
            return out
        if fault == "auxiliary loss is inf":
            return type(out)(loss=out.loss, aux=torch.tensor(float("inf")))
        broken = {
            "gradient is inf": lambda x: x * float("inf"),
            "gradient is nan": lambda x: x + (next(module.parameters()) * float("nan")).sum() * 0.0,
            "loss is nan": lambda x: x + float("nan"),
            "loss alone is inf": lambda x: x + float("inf"),
        }[fault]
        return type(out)(loss=broken(out.loss))

    session.trainable.loss = loss

    def after(number: int) -> None:
        state = digest(session.trainable.module.state_dict(), optimizer_state_but_lr(session))
        seen.append({"step": number, "state": state, "scale": float(step.scale.value)})

    session.trainable.between_steps = after
    before = digest(session.trainable.module.state_dict(), optimizer_state_but_lr(session))
    reporter, outcome = train(session)
    return {
        "states": [before, *(row["state"] for row in seen)],
        "scales": [row["scale"] for row in seen],
        "norms": reporter.of("train", "grad_norm"),
        "skipped": reporter.of("train", "skipped_steps"),
        "outcome": outcome.kind,
        "events": reporter.events,
        "losses": reporter.losses,
    }


def optimizer_state_but_lr(session: Session) -> list[Any]:
    """Moments and step counts; the learning rate follows the schedule even if a step is skipped."""
    return [state["state"] for state in optimizer_state(session)]


# ---------------------------------------------------------------- messages between workers


def collectives(rank: int, world_size: int) -> dict[str, Any]:
    """Every verb of `Workers`, with values that name the rank."""
    workers = Workers()
    pair = [torch.full((3,), float(rank + 1)), torch.tensor([2.0**rank])]
    workers.all_reduce(pair)
    shared = [torch.full((2,), float(rank)), torch.tensor([rank])]
    workers.broadcast(shared)
    return {
        "place": (workers.rank, workers.world_size),
        "sum": [tensor.tolist() for tensor in pair],
        "flags": workers.all_reduce_ints([rank, 1, 2**40]),
        "floats": workers.all_gather_floats([float(rank), 0.1]),
        "bytes": workers.all_gather_bytes(b"" if rank == 1 else bytes([rank]) * (rank + 2)),
        "nothing": workers.all_gather_bytes(b""),
        "broadcast": [tensor.tolist() for tensor in shared],
        "waited": workers.wait_s > 0,
    }


def aggregated(rank: int, world_size: int) -> dict[str, Any]:
    """A logged row of ten steps, and the values of each rank; also the evaluation of a rank without eval rows."""
    session = make_session(
        MLP,
        {"train": class_rows(80), "eval": class_rows(3, seed=8)},
        loop={"max_steps": 10, "log_every": 5, "micro_batch_size": 8},
    )
    told: list[list[float]] = []
    inner = session.workers.all_gather_floats

    def watched(values: list[float]) -> list[list[float]]:
        told.append(values)
        return inner(values)

    session.workers.all_gather_floats = watched  # type: ignore[method-assign]
    reporter = Rows()
    loop = session.loop(reporter=reporter, should_stop=lambda: False)
    loop.peak_memory = lambda: 1000 * (rank + 1)
    loop.run(session.state)
    rows = [row for row in reporter.rows if row["kind"] == "train"]
    evals = [row for row in reporter.rows if row["kind"] == "eval"]
    # seconds, data, waiting, peak, the device's peak rate, two shares of the losses, new metrics
    own = [[*values[:4], *values[5:7]] for values in told if len(values) == 8]
    return {"rows": rows, "own": own, "evals": evals, "alone": session.evaluate(0)}


def scored(rank: int, world_size: int) -> dict[str, Any]:
    """An evaluation of 16 rows, of which the first half, one micro-batch, has no labels."""
    session = make_session(
        GPT,
        {"train": token_rows(32), "eval": token_rows(16, seed=5, empty=range(8))},
        loop={"max_steps": 2, "micro_batch_size": 8 // EVAL_MICRO_BATCHES},
    )
    return session.evaluate(0)


def with_metrics(rank: int, world_size: int) -> list[dict[str, Any]]:
    """The train rows of four steps, each over all 20 rows in micro-batches of 4, 4 and 2, whose loss tells the mean of
    a column, from step 3 on a number of the last worker only, and a name that a row has already."""
    forwards: list[int] = []

    def loss(module: nn.Module, batch: dict[str, Any]) -> LossOutput:
        forwards.append(len(batch["x"]))
        late = {"late": 7.0} if sum(forwards) > 40 // world_size and rank == world_size - 1 else {}
        value = F.cross_entropy(module(batch["x"]), batch["labels"])
        return LossOutput(value, metrics={"first": batch["x"][:, 0].mean(), "lr": torch.tensor(9.0), **late})  # type: ignore[dict-item]

    module = nn.Linear(12, 4)
    session = make_session(
        {"module": Trainable(module, loss)},
        {"train": class_rows(20), "eval_fraction": 0.0},
        loop={"max_steps": 4, "global_batch_size": 20, "micro_batch_size": 4, "log_every": 1},
    )
    session.loop(reporter=(rows := Rows()), should_stop=lambda: False).run(session.state)
    return [row for row in rows.rows if row["kind"] == "train"]
