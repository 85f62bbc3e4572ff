"""Plan rules for want of memory: what is refused, what is doubted, and what is advised."""

from __future__ import annotations

from raytrain.config.sections import LoopConfig, OptimConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Choice, Resolved
from raytrain.plan.facts import ModelFacts
from raytrain.plan.rules.memory import PROCESS_BYTES, named, told, trained_bytes
from raytrain.plan.text import size_text

LEAST_PROCESS_BYTES = PROCESS_BYTES * 9 // 10
"""What no worker is taken to do without: another build of torch for CPUs may need somewhat less."""

TINY_PARAMETERS = 1_000_000
"""On a CPU a model of fewer parameters whose activations nobody knows is not measured before it is trained."""

DOUBTFUL = 0.5
"""On a CPU an estimate above this part of what a worker may take is measured before it is relied on."""

RECOMPUTED_ABOVE = 0.7
"""An estimate above this part of what a worker may take is a reason to compute blocks again in backward."""

WORTH_RECOMPUTING = 0.1
"""Of the estimate: smaller activations than this are not worth it."""


def least_parts(
    model_facts: ModelFacts | None, optim: OptimConfig, *, on_gpu: bool, recomputed: bool, remote: bool = False,
    shards: int = 1,
) -> dict[str, int]:  # fmt: skip
    """What a worker takes for certain to train one row, by name. Of a row half the estimated activations, which are
    those of fp32 (a GPT measured 1.00 times the estimate in fp32, 0.64 times in bf16).

    Args:
        recomputed: blocks keep nothing (`loop.activation_checkpointing`).
        elsewhere: the experts are, with what they keep of a row.
        shards: into which the workers divide the model's state.
    """
    parts = {} if on_gpu else {"the process": LEAST_PROCESS_BYTES}
    if model_facts is None:
        return parts
    facts = model_facts.experts if remote else None
    away = 0 if facts is None else facts.total
    trainable = model_facts.trainable_bytes // 4 - away
    taken = trained_bytes(model_facts.parameters - away, optim, dtype="fp32", trainable=trainable)
    row = 0 if recomputed else model_facts.activation_bytes_per_sample or 0
    kept = 0 if facts is None else facts.rows_per_sample * len(facts.parameters) * facts.kept_bytes_per_row
    state = {name: value // shards for name, value in named(taken, "fp32").items()}
    return {**parts, **state, "one row": max(0, row - kept) // 2}


def check_limit(
    limit: int | None, model_facts: ModelFacts | None, optim: OptimConfig, *, on_gpu: bool, recomputed: bool,
    hosts: Resolved | None = None, shards: int = 1, one_row: Choice | None = None, key: str = "cluster.memory_limit",
) -> None:  # fmt: skip
    """Whether what a worker may take is more than it takes for certain.

    Args:
        hosts: where the experts are; None: in the workers.
        shards: see `least_parts`.
        one_row: what is estimated for a worker with one row; less may do, but hardly.
        key: which says how much.

    Raises:
        InputError: it is not.
    """
    away = hosts is not None and hosts.value not in ("none", 0)
    parts = least_parts(model_facts, optim, on_gpu=on_gpu, recomputed=recomputed, remote=away, shards=shards)
    least = sum(parts.values())
    if limit is not None and least > limit:
        likely = ""
        if isinstance(one_row, Resolved) and one_row.value > least:
            likely = f"; {size_text(one_row.value)} are estimated for one row"
        raise InputError(
            key, seen=f"{size_text(limit)} for each process",
            expected=f"more than {size_text(least)}, which no worker does without: {told(parts)}{likely}",
            remedy="null leaves it to cluster.memory_fraction" if key == "cluster.memory_limit" else "",
        )  # fmt: skip


def beyond(allowed: int | None, estimate: Choice, one_row: Choice, *, measured: bool) -> list[str]:
    """A warning where an estimate is above what a worker may take, which is no certainty.

    Args:
        estimate, one_row: bytes of a worker as planned, and with one row at a time.
        measured: memory decides at start how many rows there are.
    """
    if allowed is None or not isinstance(estimate, Resolved) or estimate.value <= allowed:
        return []
    if isinstance(one_row, Resolved) and one_row.value > allowed:
        told = f"{size_text(one_row.value)} are estimated for a worker with one row at a time"
        return [f"{told}, but it may take {size_text(allowed)}: it will hardly fit, which only the start can tell"]
    remedy = "what fits is measured at start" if measured else "lower loop.micro_batch_size"
    told = f"{size_text(estimate.value)} are estimated for each worker"
    return [f"{told}, but it may take {size_text(allowed)}: {remedy}"]


def doubt_of_memory(model_facts: ModelFacts | None, memory: Choice, allowed: int | None, *, on_gpu: bool) -> str | None:
    """Why the micro-batch that `auto` stands for should be measured before it is used; None where it need not be."""
    if on_gpu:
        return "a GPU's free memory is known to its allocator alone"
    if model_facts is None or model_facts.activation_bytes_per_sample is None:
        tiny = model_facts is not None and model_facts.parameters < TINY_PARAMETERS
        return None if tiny else "what a row of this model keeps is not known"
    if isinstance(memory, Resolved) and allowed is not None and memory.value > DOUBTFUL * allowed:
        return f"{size_text(memory.value)} are estimated, a worker may take {size_text(allowed)}"
    return None


def advise_recomputing(
    model_facts: ModelFacts | None, memory: Choice, allowed: int | None, loop: LoopConfig, *, rows: int
) -> list[str]:
    """The advice to set `loop.activation_checkpointing` where a worker will be nearly full, and mostly of activations.

    Args:
        rows: whose activations a worker keeps at a time.
    """
    if loop.activation_checkpointing or model_facts is None or not model_facts.blocks:
        return []
    if allowed is None or not isinstance(memory, Resolved):
        return []
    kept = rows * (model_facts.activation_bytes_per_sample or 0)
    if memory.value <= RECOMPUTED_ABOVE * allowed or kept < WORTH_RECOMPUTING * memory.value:
        return []
    return [
        f"{size_text(memory.value)} are estimated of the {size_text(allowed)} that a worker may take,"
        f" {size_text(kept)} of it activations: loop.activation_checkpointing true keeps only the input of each of the"
        f" {len(model_facts.blocks)} blocks, for about a third more computing"
    ]
