"""Plan rules about batches and data: rows per step, length of a run, evaluations and saves, where rows are kept.

Applied by `raytrain.plan.plan`. The loader and the batch-size search divide a global batch by the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.wording import counted
from raytrain.config.sections import DataConfig, LoopConfig, OptimConfig, SaveConfig, ScaleConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Choice, Deferred, Resolved, size_text
from raytrain.plan.facts import DataFacts

REFERENCE_BATCH = 32
"""`optim.scale_lr` scales `optim.lr` by global batch / 32: 32 is the default global batch."""

EVAL_SHARE = 0.1
"""Evaluations within an epoch may take about this fraction of a run."""

EVAL_COST = 1 / 3
"""Cost of a forward pass relative to a forward and backward pass."""

EVAL_MICRO_BATCHES = 4
"""Micro-batches in one eval batch: a forward pass without gradients keeps no activations and needs less memory."""

AFTER_DATA = "read from the data at start"


def choose_global_batch(loop: LoopConfig, data_facts: DataFacts | None) -> int:
    """Rows per optimizer step. Raises InputError if there are no rows, or fewer than one global batch."""
    if loop.global_batch_size == "auto":
        raise InputError(
            "loop.global_batch_size", got="auto", expected="a number",
            remedy="`raytrain tune` searches for the best batch size",
        )  # fmt: skip
    if data_facts is not None:
        if data_facts.train_rows < 1:
            raise InputError("data", got="no training rows", expected="at least one", remedy=data_facts.reason)
        if loop.global_batch_size > data_facts.train_rows:
            raise InputError(
                "loop.global_batch_size", got=str(loop.global_batch_size),
                expected=f"at most {data_facts.train_rows}, the number of training rows",
                remedy=f"set loop.global_batch_size={data_facts.train_rows} or less, or add data "
                f"({data_facts.reason})",
            )  # fmt: skip
    return loop.global_batch_size


def one_worker_for_whole(scale: ScaleConfig, loop: LoopConfig) -> tuple[ScaleConfig, str]:
    """`scale` with the one worker that computes a global batch which must not be split, and the reason; `scale` itself
    and "" where it may be split. Raises InputError if several workers are asked for."""
    if loop.micro_batch_size != "whole":
        return scale, ""
    least = scale.workers[0] if isinstance(scale.workers, tuple) else scale.workers
    if least not in ("auto", 1):
        raise InputError(
            "scale.workers", got=f"{scale.workers} with loop.micro_batch_size whole",
            expected="1 or auto, as one worker computes the whole global batch",
        )  # fmt: skip
    why = "" if scale.workers == 1 else "loop.micro_batch_size whole: one worker computes the whole global batch"
    return scale.model_copy(update={"workers": 1}), why


def choose_batches(loop: LoopConfig, *, workers: int, warnings: list[str], splits: int = 1) -> dict[str, Resolved]:
    """micro_batch_size, accumulation (micro-batches of the busiest worker) and effective_batch. Micro-batches of one
    global batch go to the workers in order, as evenly as whole ones can; `auto` cuts each equal share into `splits`."""
    total = loop.global_batch_size
    assert isinstance(total, int)  # choose_global_batch has refused "auto"
    if loop.micro_batch_size == "whole":
        micro, chosen = total, Resolved(total, "loop.micro_batch_size whole: the global batch in one pass, never split")
    elif loop.micro_batch_size == "auto":
        micro = math.ceil(total / (workers * splits))
        reason = f"global batch {total} / {workers} workers" if workers > 1 else "the global batch"
        reason += f" / {splits}, so that scale.shares can differ by less than a full share" if splits > 1 else ""
        chosen = Resolved(micro, reason)
    elif loop.micro_batch_size > total:
        raise InputError(
            "loop.micro_batch_size", got=str(loop.micro_batch_size),
            expected=f"at most loop.global_batch_size, {total}",
        )  # fmt: skip
    else:
        micro = loop.micro_batch_size
        chosen = Resolved(micro, "loop.micro_batch_size")
    pieces = math.ceil(total / micro)
    accumulation = math.ceil(pieces / workers)
    if pieces < workers:
        warnings.append(
            f"a global batch of {total} rows is {pieces} micro-batches of {micro}: {workers - pieces} of"
            f" {workers} workers have none; lower loop.micro_batch_size"
        )
    cut = counted(pieces, "micro-batch", "micro-batches")
    formula = f"micro {micro} x accumulation {accumulation} x {counted(workers, 'worker')}"
    slots = micro * accumulation * workers
    if slots != total:
        formula += f" = {slots}, of which {total} are filled: the rows do not divide evenly"
    return {
        "micro_batch_size": chosen,
        "accumulation": Resolved(accumulation, f"{cut} / {counted(workers, 'worker')}, rounded up"),
        "effective_batch": Resolved(total, formula),
    }


def defer_micro_batch(loop: LoopConfig, batches: Mapping[str, Resolved], *, doubt: str | None) -> Mapping[str, Choice]:
    """`batches` with the micro-batch deferred to a measurement by the workers if it is `auto`, in doubt and could be
    smaller; otherwise `batches` unchanged."""
    micro, accumulation = batches["micro_batch_size"], batches["accumulation"]
    if loop.micro_batch_size != "auto" or doubt is None or micro.value == 1:
        return batches
    how = "the largest that fits, measured with real steps at start"
    bounds = accumulation.value, accumulation.value * micro.value
    return {
        **batches,
        "micro_batch_size": Deferred(how, (1, micro.value), doubt),
        "accumulation": Deferred("with the micro-batch", bounds),
    }


def choose_length(
    loop: LoopConfig, *, global_batch: int, data_facts: DataFacts | None, drop_last: bool = False
) -> dict[str, Choice]:
    """steps_per_epoch and max_steps (of the full run); the last partial batch of an epoch counts unless dropped."""
    if data_facts is None:
        per_epoch: Choice = Deferred(AFTER_DATA)
        if loop.max_steps and not loop.epochs:
            return {"steps_per_epoch": per_epoch, "max_steps": Resolved(loop.max_steps, "loop.max_steps")}
        bounds = (1, loop.max_steps) if loop.max_steps else ()
        length_text = counted(loop.epochs or 1, "epoch")
        length_text += f", at most {counted(loop.max_steps, 'step')}" if loop.max_steps else ""
        return {"steps_per_epoch": per_epoch, "max_steps": Deferred(AFTER_DATA, bounds, length_text)}
    steps, left = divmod(data_facts.train_rows, global_batch)
    steps += bool(left) and not drop_last
    how = f"rounded down: data.drop_last leaves out {counted(left, 'row')}" if drop_last and left else "rounded up"
    per_epoch = Resolved(steps, f"{data_facts.train_rows} rows / {global_batch}, {how}")
    epochs = loop.epochs or (None if loop.max_steps else 1)
    if epochs is None:
        return {"steps_per_epoch": per_epoch, "max_steps": Resolved(loop.max_steps, "loop.max_steps")}
    length = f"{counted(epochs, 'epoch')} of {counted(steps, 'step')}"
    if loop.max_steps and loop.max_steps < epochs * steps:
        ends = Resolved(loop.max_steps, f"loop.max_steps ends before {length}")
        return {"steps_per_epoch": per_epoch, "max_steps": ends}
    if not loop.epochs:
        length = f"neither loop.epochs nor loop.max_steps is given: {length}"
    return {"steps_per_epoch": per_epoch, "max_steps": Resolved(epochs * steps, length)}


def choose_lr(optim: OptimConfig, *, global_batch: int) -> Resolved:
    """The peak learning rate, scaled with the global batch if `optim.scale_lr` says so."""
    ratio = global_batch / REFERENCE_BATCH
    if optim.scale_lr == "none":
        return Resolved(optim.lr, "optim.lr")
    factor = ratio if optim.scale_lr == "linear" else math.sqrt(ratio)
    why = f"optim.lr {optim.lr:g} x {factor:g}: {optim.scale_lr} in {global_batch} / {REFERENCE_BATCH} rows"
    return Resolved(optim.lr * factor, why)


def choose_warmup(optim: OptimConfig, max_steps: Choice, warnings: list[str]) -> Choice:
    if optim.warmup_steps != "auto":
        if isinstance(max_steps, Resolved) and optim.warmup_steps >= max_steps.value:
            run = max_steps.value
            warnings.append(f"optim.warmup_steps {optim.warmup_steps} is no shorter than the run of {run} steps")
        return Resolved(optim.warmup_steps, "optim.warmup_steps")
    if isinstance(max_steps, Deferred):
        return Deferred(max_steps.how, (0, 100), "the smaller of 100 steps and 5 % of the run")
    return Resolved(min(100, max_steps.value // 20), "the smaller of 100 steps and 5 % of the run")


def choose_eval_every(
    loop: LoopConfig, *, max_steps: Choice, steps_per_epoch: Choice, data_facts: DataFacts | None
) -> Choice:
    """Steps between evaluations; 0 without evaluation rows. A run always evaluates at its end."""
    if data_facts is not None and data_facts.eval_rows == 0:
        return Resolved(0, "there are no evaluation rows")
    if loop.eval_every != "auto":
        return Resolved(loop.eval_every, "loop.eval_every")
    if data_facts is None or isinstance(max_steps, Deferred) or isinstance(steps_per_epoch, Deferred):
        return Deferred(AFTER_DATA, (), "the end of each epoch, or about ten times in a shorter run")
    run, epoch = max_steps.value, steps_per_epoch.value
    if run >= 2 * epoch:
        return Resolved(epoch, "the end of each epoch")
    batch = loop.global_batch_size
    assert isinstance(batch, int)
    rows = min(data_facts.eval_rows, (loop.eval_batches or data_facts.eval_rows) * batch)
    affordable = int(EVAL_SHARE * run * batch / (EVAL_COST * rows))
    times = max(1, min(10, affordable))
    every = min(run, max(50, math.ceil(run / times)))
    if every >= run:
        return Resolved(run, "only at the end of the run: the run is short compared with an evaluation")
    return Resolved(every, f"{run // every} times, within {EVAL_SHARE:.0%} of a run of under two epochs")


def choose_best_saves(save: SaveConfig, eval_every: Choice, *, shared: bool) -> Choice | None:
    """When a checkpoint is saved because its evaluation is the best so far; None without evaluations. `shared`: other
    processes than the first worker write parts of a checkpoint."""
    if eval_every.value_or(None) == 0:
        return None
    if shared or save.keep == "all" or not save.asynchronous:
        why = "save.keep is all" if save.keep == "all" else "save.asynchronous is false"
        why = "other processes write parts of it" if shared else why
        return Resolved("at once", f"each evaluation that is the best so far leaves a checkpoint; {why}")
    return Resolved(
        "at once, or from a copy",
        "each evaluation that is the best so far leaves a checkpoint; where writing would take more than 10 % of the "
        "time, a copy in memory waits, and a better one replaces it",
    )


def choose_export(save: SaveConfig, loop: LoopConfig, *, data_facts: DataFacts | None) -> Choice:
    """Whose weights a finished run exports: "best" by eval loss, or "last". Raises InputError if the best is asked for,
    and there are no evaluation rows."""
    evaluates = data_facts is None or data_facts.eval_rows > 0
    if save.export == "best" and not evaluates:
        raise InputError(
            "save.export", got="best without evaluation rows", expected="auto or last, or an eval split",
            remedy="data.eval_fraction keeps a part of the data for evaluation",
        )  # fmt: skip
    if save.export != "auto":
        return Resolved(save.export, "save.export")
    if loop.patience is None:
        return Resolved("last", "loop.patience is null")
    if not evaluates:
        return Resolved("last", "there are no evaluation rows")
    return Resolved("best", "loop.patience ends the run after its best evaluation")


# ---------------------------------------------------------------- storage


OVERHEAD = 1.1
"""Factor by which rows on a device take more than their bytes: alignment, and the gathered batch."""

SPARE = 0.9
"""Fraction of a device's remaining memory that rows may take, since the rest is only estimated."""

LEAST_PART = 0.05
"""A smaller fraction of the rows is not worth keeping on the device."""

VARIES = "items differ from one reading to the next, as with random transforms"
KEEPS_RANDOM = "data.storage=stream reads them in every epoch"

SLOW_S = 2.0
"""Reading all items before the first step is avoided where it takes longer than this, and the run needs only some."""

MOST_LOADERS = 4
"""The most loader processes per worker that `auto` chooses."""


@dataclass(frozen=True)
class DataRoom:
    """The memory of a worker that is left for data."""

    allowed: int | None  # bytes that a worker may use of its device, or of its node's memory; None where unknown
    model_bytes: int | None  # planned, of weights, gradients, optimizer state and activations; None where unknown
    whole: bool  # `model_bytes` includes the activations
    on_gpu: bool

    @property
    def certain(self) -> int | None:
        """The most bytes that data can take."""
        return None if self.allowed is None else self.allowed - (self.model_bytes or 0)

    @property
    def left(self) -> int:
        """Bytes that `auto` gives to data; half of the remaining memory where the activations are unknown."""
        return max(0, int((self.certain or 0) * (SPARE if self.whole else 0.5)))

    def text(self) -> str:
        """`left` and how it is computed."""
        if self.model_bytes is None:
            why = "half of the memory of a worker, since the size of the model is not known yet"
            return f"{size_text(self.left)}, {why}"
        part = f"{size_text(self.left)}: {'90' if self.whole else '50'} % of what is left"
        return f"{part} of {size_text(self.allowed or 0)} after {size_text(self.model_bytes)} for the model"


def choose_storage(
    data: DataConfig, *, facts: DataFacts | None, room: DataRoom, loaders: Choice, warnings: list[str],
    reads: int | None = None,
) -> dict[str, Choice]:  # fmt: skip
    """`storage`: resident (the full split on the device), partial (its first `resident_rows`), pinned (batches copied
    ahead of time through pinned memory) or stream (each batch moved on demand).

    Args:
        loaders: processes that would read streamed rows.
        reads: rows that the run trains on, each counted as often as it is used; None: at least all of them once.
    Raises:
        InputError: `resident` is configured, and the rows cannot fit.
    """
    requested = data.storage
    if requested == "pinned" and not room.on_gpu:
        chosen = _by_bytes(facts, room, loaders=loaders, reads=reads)
        why, storage = "data.storage pinned needs a GPU, and there is none", chosen["storage"]
        warnings.append(f"{why}: {storage.value_or('the result of auto')} instead")
        reason = why if isinstance(storage, Deferred) else f"{why}; {storage.reason}"
        return {**chosen, "storage": replace(storage, reason=reason)}
    if requested == "resident" and facts is not None:
        need, most = int(facts.total_bytes * OVERHEAD), room.certain
        if most is not None and need > most:
            used = f"a worker may use {size_text(room.allowed or 0)}"
            if room.model_bytes is not None:
                used += f", {size_text(room.model_bytes)} of it for weights, optimizer and activations"
            raise InputError(
                "data.storage", got=f"resident for {size_text(need)} of data",
                expected=f"at most {size_text(max(0, most))}: {used}",
                remedy="auto keeps what fits and streams the rest; stream keeps nothing",
            )  # fmt: skip
        if facts.varies:
            warnings.append(f"data.storage resident keeps the first reading of each item, and {VARIES}: {KEEPS_RANDOM}")
    if requested != "auto":
        return {"storage": Resolved(requested, "data.storage")}
    return _by_bytes(facts, room, loaders=loaders, reads=reads)


def _by_bytes(facts: DataFacts | None, room: DataRoom, *, loaders: Choice, reads: int | None) -> dict[str, Choice]:
    streamed = "pinned" if room.on_gpu else "stream"
    if facts is None:
        return {"storage": Deferred(AFTER_DATA, ("resident", streamed))}
    if facts.varies:
        return {"storage": Resolved(streamed, VARIES)}
    whole_s = (facts.item_s or 0.0) * (facts.train_rows + facts.eval_rows)
    if reads is not None and reads < facts.train_rows and whole_s > SLOW_S:
        why = f"the run trains on {reads:,} of {facts.train_rows:,} rows, and to read all takes about {whole_s:.0f} s"
        return {"storage": Resolved(streamed, why)}
    need = int(facts.total_bytes * OVERHEAD)
    if room.allowed is None:
        reason = f"{size_text(need)} of data; the device's free memory is unknown"
        return {"storage": Resolved(streamed, reason)}
    numbers = f"{size_text(need)} of data, room for {room.text()}"
    if need < room.left:
        return {"storage": Resolved("resident", numbers)}
    rows = min(facts.train_rows, int(room.left / (facts.row_bytes * OVERHEAD))) if facts.row_bytes else 0
    read_beside = facts.kind == "items" and loaders.value_or(0)
    can_part = (facts.kind == "items" and not read_beside) or (facts.kind == "memory" and room.on_gpu)
    if not can_part or rows < LEAST_PART * facts.train_rows:
        return {"storage": Resolved(streamed, numbers)}
    share = rows / facts.train_rows
    return {
        "storage": Resolved("partial", numbers),
        "resident_rows": Resolved(rows, f"{share:.0%} of {facts.train_rows:,} rows fit; the others are streamed"),
    }


def resident_bytes(facts: DataFacts | None, choices: Mapping[str, Choice]) -> int:
    """Bytes that the chosen storage keeps on the device of each worker."""
    storage, rows = choices["storage"], choices.get("resident_rows")
    if facts is None or not isinstance(storage, Resolved):
        return 0
    if storage.value == "partial" and isinstance(rows, Resolved):
        return rows.value * facts.row_bytes
    return facts.total_bytes if storage.value == "resident" else 0


def choose_loaders(
    data: DataConfig, *, facts: DataFacts | None, counts: Mapping[str, int], cores: Mapping[str, int],
    warnings: list[str],
) -> Choice:  # fmt: skip
    """Processes of each worker that read a dataset item by item.

    `auto` leaves one core of each node to training: no process on one core, one on two cores. `counts` are the workers
    of each node, `cores` its cores.
    """
    requested = data.loader_workers
    if requested == 0:
        return Resolved(0, "data.loader_workers")
    if facts is None:
        return Deferred(AFTER_DATA) if requested == "auto" else Resolved(requested, "data.loader_workers")
    if facts.kind != "items" or data.storage == "resident":
        why = "rows are in memory" if facts.kind == "memory" else "row groups are read by a thread"
        why = "every item is read once, before the first step" if facts.kind == "items" else why
        if requested != "auto":
            warnings.append(f"data.loader_workers {requested} is not needed: {why}")
        return Resolved(0, why)
    if requested != "auto":
        host = min(counts, key=lambda name: cores[name] - requested * counts[name])
        if requested * counts[host] > cores[host] - 1:
            warnings.append(f"{requested * counts[host]} loader processes on the {cores[host]} cores of {host}")
        return Resolved(requested, "data.loader_workers")
    host = min(counts, key=lambda name: (cores[name] - 1) / counts[name])
    spare = max(0, (cores[host] - 1) // counts[host])
    reason = f"{cores[host]} cores less one / {counted(counts[host], 'worker')} on {host}, at most {MOST_LOADERS}"
    return Resolved(min(MOST_LOADERS, spare), reason)


def halved(size: int) -> int:
    """Half a micro-batch, rounded up, so that twice as many of them cover a global batch."""
    return (size + 1) // 2
