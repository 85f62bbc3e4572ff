"""Plan rules about memory: what a worker and a host of experts take, by formula.

Pure: facts, sections and decisions in, choices out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain.config.sections import LoopConfig, OptimConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Choice, Deferred, Resolved
from raytrain.plan.facts import ExpertFacts, HeldExperts, ModelFacts
from raytrain.plan.rules.fsdp import gathered_bytes
from raytrain.plan.text import size_text

AFTER_MODEL = "known after start (or plan --build)"

PROCESS_BYTES = 464 << 20
"""Resident set of a worker that has a model of 2,000 weights and no row yet: Python, torch with its compiler, Ray with
its own threads, Ray Train and ours. Measured with torch 2.13.0+cpu and Ray 2.60.0 on Linux, as VmRSS of rank 0 once its
session was built; 481 MiB were its peak over three steps. The imports and an optimizer alone are 430 MiB, in a trial of
`tune` 435."""

HOST_PROCESS_BYTES = 330 << 20
"""The same of a host of experts, which does without Ray Train."""

SHOWN_HOSTS = 4
"""More hosts than this are told by the fullest and the emptiest."""

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

ShareOut = Callable[[int], Sequence[HeldExperts]]
"""Number of equal holders -> what each of them begins with."""


@dataclass(frozen=True)
class StateBytes:
    """What parameters take where they are trained.

    Weights, gradients and the optimizer's moments are kept in the master format (4 bytes, fp64: 8); a half precision
    adds a cast copy of the weights.
    """

    weights: int
    gradients: int
    optimizer: int
    cast: int

    @property
    def kept(self) -> int:
        """Without the cast copy, which lives for a step."""
        return self.weights + self.gradients + self.optimizer


def trained_bytes(parameters: int, optim: OptimConfig, *, dtype: str, trainable: int | None = None) -> StateBytes:
    """Bytes of `parameters`, of which `trainable` (None: all) are trained."""
    width = 8 if dtype == "fp64" else 4
    trained = width * (parameters if trainable is None else trainable)
    cast = 2 * parameters if dtype in ("bf16", "fp16") else 0
    return StateBytes(width * parameters, trained, moments(optim) * trained, cast)


def held_bytes(held: HeldExperts, optim: OptimConfig, *, dtype: str) -> StateBytes:
    """Bytes on one holder: a replica has weights and gradients, and no optimizer."""
    homes, replicas = (trained_bytes(size, optim, dtype=dtype) for size in (held.homes, held.replicas))
    weights, gradients = homes.weights + replicas.weights, homes.gradients + replicas.gradients
    return StateBytes(weights, gradients, homes.optimizer, homes.cast + replicas.cast)


def moments(optim: OptimConfig) -> int:
    """Numbers the optimizer keeps for each parameter; Muon's, whose AdamW keeps one more for what is in no block."""
    if optim.name == "sgd":
        return int(optim.momentum > 0)
    return 2 if optim.name == "adamw" else 1


def estimate_bytes(
    model_facts: ModelFacts | None, optim: OptimConfig, *, precision: Choice, micro: int, resident: int, on_gpu: bool,
    workers: int, hosts: Resolved, share_out: ShareOut | None, sharded: bool = False,
) -> dict[str, Choice]:  # fmt: skip
    """parameters, memory (bytes of one worker), experts, host_memory (of the fullest host) and checkpoint_bytes.

    Args:
        resident: bytes of data kept on the device.
        on_gpu: a device holds no process.
        hosts: where experts are, as `choose_hosts` says.
        share_out: None where nobody knows the experts' sizes.
        sharded: each worker holds its rows of everything.
    """
    place = hosts.value
    if model_facts is None:
        return _unknown(place)
    dtype = str(precision.candidates[0])
    facts, held = model_facts.experts, []
    if facts is not None and share_out is not None and place not in ("none", 0):
        held = share_out(workers if place == "colocated" else _separate(place))
    trainable = model_facts.trainable_bytes // 4
    away = facts.total if facts is not None and held else 0
    here = trained_bytes(model_facts.parameters - away, optim, dtype=dtype, trainable=trainable - away)
    fullest = max((held_bytes(own, optim, dtype=dtype) for own in held), key=lambda taken: taken.kept, default=here)
    rows = 0 if facts is None else facts.rows_per_sample * len(facts.parameters) * micro
    kept = 0 if facts is None else rows * facts.kept_bytes_per_row
    activations = (model_facts.activation_bytes_per_sample or 0) * micro
    parts = named(here, dtype) if not sharded else _sharded(model_facts, here, dtype, workers=workers)
    if held and place == "colocated":
        parts["its experts"] = fullest.kept + fullest.cast
    elif held:
        activations = max(0, activations - kept)
    parts |= {"activations": activations, "data": resident, "process": 0 if on_gpu else PROCESS_BYTES}
    unsaid = "; its blocks are unknown" if sharded and not model_facts.blocks else ""
    unsaid += ("" if activations else "; activations unknown") + ("; without CUDA's own" if on_gpu else "")
    host_memory = Resolved(None, "no separate hosts")
    if held and place != "colocated":
        process = 0 if on_gpu else HOST_PROCESS_BYTES
        taken = {**named(fullest, dtype), "activations": workers * kept // len(held), "process": process}
        host_memory = Resolved(sum(taken.values()), f"{parts_text(taken)}, the fullest of {len(held)}")
    whole = trained_bytes(model_facts.parameters, optim, dtype=dtype, trainable=trainable)
    saved = f"weights and {moments(optim)} optimizer moments"
    frozen = "" if trainable == model_facts.parameters else f"; {trainable:,} of them trained"
    return {
        "parameters": Resolved(model_facts.parameters, model_facts.reason + frozen),
        "memory": Resolved(sum(parts.values()), parts_text(parts) + unsaid),
        "experts": _experts(facts, place, held, optim, dtype=dtype),
        "host_memory": host_memory,
        "checkpoint_bytes": Resolved(whole.weights + whole.optimizer, saved),
    }


def _sharded(facts: ModelFacts, whole: StateBytes, dtype: str, *, workers: int) -> dict[str, int]:
    """Bytes of one of so many workers, each with its rows of everything."""
    kept = {"weights": whole.weights, "gradients": whole.gradients, "optimizer": whole.optimizer}
    shares = {f"{name} / {workers}": -(-size // workers) for name, size in kept.items()}
    return {**shares, "a block together": gathered_bytes(facts, dtype=dtype) or 0}


def _unknown(place: Any) -> dict[str, Choice]:
    unknown, none = Deferred(AFTER_MODEL), Resolved(None, "no separate hosts")
    return {
        "parameters": unknown,
        "memory": unknown,
        "experts": none if place == "none" else unknown,
        "host_memory": none if place in ("none", 0, "colocated") else unknown,
        "checkpoint_bytes": unknown,
    }


def _separate(place: Any) -> int:
    return sum(place.values()) if isinstance(place, dict) else int(place)


def named(taken: StateBytes, dtype: str) -> dict[str, int]:
    """The parts of it by the names that a plan shows."""
    kept = {"weights": taken.weights, "gradients": taken.gradients, "optimizer": taken.optimizer}
    return {**kept, f"{dtype} copy": taken.cast}


def parts_text(parts: dict[str, int]) -> str:
    """Those parts as one line."""
    return " + ".join(f"{name} {size_text(value)}" for name, value in parts.items() if value)


def _experts(
    facts: ExpertFacts | None, place: Any, held: Sequence[HeldExperts], optim: OptimConfig, *, dtype: str
) -> Choice:
    """Where the experts are at the start, with the bytes of each holder and of one expert."""
    if place == "none":
        return Resolved(None, "the model has no experts")
    if facts is None:
        return Deferred("known after start: only the run reads the sizes of a model's own experts")
    sizes = sorted({one for layer in facts.parameters for one in layer})
    number = sum(map(len, facts.parameters))
    one = trained_bytes(sizes[-1], optim, dtype=dtype)
    each = f"each {size_text(one.kept)}" if len(sizes) == 1 else f"the largest {size_text(one.kept)}"
    each += f" (weights {size_text(one.weights)}, gradients {size_text(one.gradients)}"
    each += f", optimizer {size_text(one.optimizer)})" if one.optimizer else ")"
    each += f"; gates {size_text(facts.gate_bytes)} in every worker"
    if not held:
        return Resolved(f"{number} in every worker", each)
    name = "worker" if place == "colocated" else "host"
    filled = [(own.number, held_bytes(own, optim, dtype=dtype).kept) for own in held]
    if len(filled) <= SHOWN_HOSTS:
        told = [f"{name} {n}: {count}, {size_text(taken)}" for n, (count, taken) in enumerate(filled)]
        return Resolved(f"{number} on {len(held)} {name}s", f"{'; '.join(told)}; {each}")
    few, many = min(filled, key=lambda pair: pair[1]), max(filled, key=lambda pair: pair[1])
    span = f"{few[0]} to {many[0]} on each, {size_text(few[1])} to {size_text(many[1])}"
    if few == many:
        span = f"{many[0]} on each, {size_text(many[1])}"
    return Resolved(f"{number} on {len(held)} {name}s", f"{span}; {each}")


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
        if one_row is not None and (estimated := one_row.value_or(0)) > least:
            likely = f"; {size_text(estimated)} are estimated for one row"
        raise InputError(
            key, seen=f"{size_text(limit)} for each process",
            expected=f"more than {size_text(least)}, which no worker does without: {parts_text(parts)}{likely}",
            remedy="null leaves it to cluster.memory_fraction" if key == "cluster.memory_limit" else "",
        )  # fmt: skip


def warn_over_budget(allowed: int | None, estimate: Choice, one_row: Choice, *, measured: bool) -> list[str]:
    """A warning where an estimate is above what a worker may take, which is no certainty.

    Args:
        estimate, one_row: bytes of a worker as planned, and with one row at a time.
        measured: memory decides at start how many rows there are.
    """
    planned, smallest = estimate.value_or(0), one_row.value_or(0)
    if allowed is None or planned <= allowed:
        return []
    if smallest > allowed:
        needed = f"{size_text(smallest)} are estimated for a worker with one row at a time"
        return [f"{needed}, but it may take {size_text(allowed)}: it will hardly fit, which only the start can tell"]
    remedy = "what fits is measured at start" if measured else "lower loop.micro_batch_size"
    return [f"{size_text(planned)} are estimated for each worker, but it may take {size_text(allowed)}: {remedy}"]


def reason_to_measure(
    model_facts: ModelFacts | None, memory: Choice, allowed: int | None, *, on_gpu: bool
) -> str | None:
    """Why the micro-batch that `auto` stands for should be measured before it is used; None where it need not be."""
    if on_gpu:
        return "a GPU's free memory is known to its allocator alone"
    if model_facts is None or model_facts.activation_bytes_per_sample is None:
        tiny = model_facts is not None and model_facts.parameters < TINY_PARAMETERS
        return None if tiny else "what a row of this model keeps is not known"
    estimated = memory.value_or(0)
    if allowed is not None and estimated > DOUBTFUL * allowed:
        return f"{size_text(estimated)} are estimated, a worker may take {size_text(allowed)}"
    return None


def advise_activation_checkpointing(
    model_facts: ModelFacts | None, memory: Choice, allowed: int | None, loop: LoopConfig, *, rows: int
) -> list[str]:
    """The advice to set `loop.activation_checkpointing` where a worker will be nearly full, and mostly of activations.

    Args:
        rows: whose activations a worker keeps at a time.
    """
    if loop.activation_checkpointing or model_facts is None or not model_facts.blocks:
        return []
    if allowed is None:
        return []
    kept = rows * (model_facts.activation_bytes_per_sample or 0)
    estimated = memory.value_or(0)
    if estimated <= RECOMPUTED_ABOVE * allowed or kept < WORTH_RECOMPUTING * estimated:
        return []
    return [
        f"{size_text(estimated)} are estimated of the {size_text(allowed)} that a worker may take,"
        f" {size_text(kept)} of it activations: loop.activation_checkpointing true keeps only the input of each of the"
        f" {len(model_facts.blocks)} blocks, for about a third more computing"
    ]
