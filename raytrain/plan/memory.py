"""Plan rules about memory: what weights, gradients, optimizer and activations need on a worker or an expert host.

From the estimate follows what is refused, measured at the start, or advised; `scale.strategy: fsdp` decides some of it
differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raytrain.config.sections import LoopConfig, OptimConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Choice, Deferred, Resolved, size_text
from raytrain.plan.facts import ExpertFacts, HeldExperts, ModelFacts, scaled_bytes

AFTER_MODEL = "known after start (or plan --build)"

PROCESS_BYTES = 464 << 20
"""Resident set of a worker with a model of 2,000 weights, before the first row: Python, torch with its compiler, Ray
with its threads, Ray Train and raytrain. Measured with torch 2.13.0+cpu and Ray 2.60.0 on Linux, as VmRSS of rank 0
after its session was built; the peak over three steps was 481 MiB. The imports and an optimizer alone are 430 MiB, in a
trial of `tune` 435."""

HOST_PROCESS_BYTES = 330 << 20
"""The same for an expert host, which does not load Ray Train."""

SHOWN_HOSTS = 4
"""With more hosts than this, only the fullest and the emptiest are shown."""

LEAST_PROCESS_BYTES = PROCESS_BYTES * 9 // 10
"""The least that a worker process needs: other CPU builds of torch may need somewhat less than was measured."""

TINY_PARAMETERS = 1_000_000
"""On a CPU, a model with fewer parameters and unknown activations is not measured before training."""

DOUBTFUL = 0.5
"""On a CPU, an estimate above this fraction of a worker's memory is measured before training relies on it."""

RECOMPUTED_ABOVE = 0.7
"""An estimate above this fraction of a worker's memory is a reason to recompute blocks in backward."""

WORTH_RECOMPUTING = 0.1
"""Activations below this fraction of the estimate are not worth recomputing."""

ShareOut = Callable[[int], Sequence[HeldExperts]]
"""Number of equal processes -> the experts that each of them holds at the start."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes that parameters take in the process that trains them, all but the copy of the weights in half precision in
    the master format (4 bytes, fp64: 8)."""

    weights: int
    gradients: int
    optimizer: int
    cast: int

    @property
    def kept(self) -> int:
        """Without the cast copy, which exists only during a step."""
        return self.weights + self.gradients + self.optimizer


def trained_bytes(parameters: int, optim: OptimConfig, *, dtype: str, trainable: int | None = None) -> StateBytes:
    """Bytes of `parameters`, of which `trainable` (None: all) are trained."""
    width = 8 if dtype == "fp64" else 4
    trained = width * (parameters if trainable is None else trainable)
    cast = 2 * parameters if dtype in ("bf16", "fp16") else 0
    return StateBytes(width * parameters, trained, moments(optim) * trained, cast)


def held_bytes(held: HeldExperts, optim: OptimConfig, *, dtype: str) -> StateBytes:
    """Bytes of the experts of one process: a replica has weights and gradients but no optimizer state."""
    homes, replicas = (trained_bytes(size, optim, dtype=dtype) for size in (held.homes, held.replicas))
    weights, gradients = homes.weights + replicas.weights, homes.gradients + replicas.gradients
    return StateBytes(weights, gradients, homes.optimizer, homes.cast + replicas.cast)


def moments(optim: OptimConfig) -> int:
    """Values that the optimizer keeps per parameter. Muon keeps one; its AdamW for parameters outside the blocks keeps
    one more (`outside_moments`)."""
    if optim.name == "sgd":
        return int(optim.momentum > 0)
    return 2 if optim.name == "adamw" else 1


def outside_moments(facts: ModelFacts, optim: OptimConfig, *, dtype: str) -> int:
    """Bytes of the second moments that Muon's AdamW keeps for parameters outside the blocks; 0 for other optimizers."""
    if optim.name != "muon" or not facts.blocks:
        return 0
    return (8 if dtype == "fp64" else 4) * max(0, facts.parameters - sum(facts.blocks))


def estimate_bytes(
    model_facts: ModelFacts | None, optim: OptimConfig, *, precision: Choice, micro: int, resident: int, on_gpu: bool,
    workers: int, hosts: Resolved, share_out: ShareOut | None, sharded: bool = False, recomputed: bool = False,
) -> dict[str, Choice]:  # fmt: skip
    """The choices parameters, memory (bytes of one worker), experts, host_memory (of the fullest host) and
    checkpoint_bytes.

    Args:
        resident: bytes of data kept on the device.
        on_gpu: the memory is a GPU's, which does not hold the process itself.
        share_out: None where the sizes of the experts are unknown.
        sharded: each worker holds its rows of every tensor (`scale.strategy: fsdp`).
        recomputed: blocks are recomputed in backward (`loop.activation_checkpointing`).
    """
    place = hosts.value
    if model_facts is None:
        none = Resolved(None, "no separate hosts")
        known: dict[str, Choice] = {} if place not in ("none", 0, "colocated") else {"host_memory": none}
        known |= {"experts": none} if place == "none" else {}
        names = ("parameters", "memory", "experts", "host_memory", "checkpoint_bytes")
        return {**dict.fromkeys(names, Deferred(AFTER_MODEL)), **known}
    dtype, facts, held = widest(precision), model_facts.experts, []
    if facts is not None and share_out is not None and place not in ("none", 0):
        hosts_of_their_own = sum(place.values()) if isinstance(place, dict) else place
        held = share_out(workers if place == "colocated" else hosts_of_their_own)
    trainable = model_facts.trainable_bytes // 4
    away = facts.total if facts is not None and held else 0
    here = trained_bytes(model_facts.parameters - away, optim, dtype=dtype, trainable=trainable - away)
    here = replace(here, optimizer=here.optimizer + outside_moments(model_facts, optim, dtype=dtype))
    fullest = max((held_bytes(own, optim, dtype=dtype) for own in held), key=lambda used: used.kept, default=here)
    rows = 0 if facts is None else facts.rows_per_sample * len(facts.parameters) * micro
    # an expert keeps nothing of its rows where its block is recomputed
    kept = 0 if facts is None or recomputed else scaled_bytes(rows * facts.kept_bytes_per_row, dtype)
    activations = micro * (model_facts.row_bytes(dtype, recomputed=recomputed) or 0)
    parts = named(here, dtype)
    if sharded:  # each worker has its rows of every tensor
        overlap = on_gpu and workers > 1
        parts.popitem()  # a copy of the weights is made of what is gathered
        parts = {f"{name} / {workers}": -(-size // workers) for name, size in parts.items()}
        title = "a gathered block and the next one" if overlap else "a gathered block"
        parts[title] = gathered_bytes(model_facts, dtype=dtype, overlap=overlap) or 0
    if held and place == "colocated":
        parts["its experts"] = fullest.kept + fullest.cast
    elif held:
        activations = max(0, activations - kept)
    parts |= {"activations": activations, "data": resident, "process": 0 if on_gpu else PROCESS_BYTES}
    if facts is not None and facts.replay_bytes and not on_gpu:
        parts |= {"rows to replay": facts.replay_bytes, "a copy in a sleep cycle": here.weights + here.optimizer}
    unsaid = "; its blocks are unknown" if sharded and not model_facts.blocks else ""
    unsaid += ("" if activations else "; activations unknown") + ("; without CUDA's own" if on_gpu else "")
    host_memory = Resolved(None, "no separate hosts")
    if held and place != "colocated":
        process = 0 if on_gpu else HOST_PROCESS_BYTES
        used = {**named(fullest, dtype), "activations": workers * kept // len(held), "process": process}
        host_memory = Resolved(sum(used.values()), f"{parts_text(used)}: the largest of {len(held)} expert hosts")
    whole = trained_bytes(model_facts.parameters, optim, dtype=dtype, trainable=trainable)
    frozen = "" if trainable == model_facts.parameters else f"; {trainable:,} of them trained"
    saved = f"weights and {moments(optim)} optimizer moments"
    return {
        "parameters": Resolved(model_facts.parameters, model_facts.reason + frozen),
        "memory": Resolved(sum(parts.values()), parts_text(parts) + unsaid),
        "experts": _experts(facts, place, held, optim, dtype=dtype),
        "host_memory": host_memory,
        "checkpoint_bytes": Resolved(whole.weights + whole.optimizer, saved),
    }


def widest(precision: Choice) -> str:
    """The format of the estimate: where formats are compared at the start, fp32, which needs the most memory."""
    return "fp32" if "fp32" in precision.candidates else str(precision.candidates[0])


def named(used: StateBytes, dtype: str) -> dict[str, int]:
    kept = {"weights": used.weights, "gradients": used.gradients, "optimizer": used.optimizer}
    return {**kept, f"{dtype} copy": used.cast}


def parts_text(parts: dict[str, int]) -> str:
    """The parts that are not zero, as one line."""
    return " + ".join(f"{name} {size_text(value)}" for name, value in parts.items() if value)


def _experts(
    facts: ExpertFacts | None, place: Any, held: Sequence[HeldExperts], optim: OptimConfig, *, dtype: str
) -> Choice:
    """Where the experts are at the start, with the bytes of each process and of one expert."""
    if place == "none":
        return Resolved(None, "the model has no experts")
    if facts is None:
        return Deferred("known after start: only the run reads the expert sizes of a user's model")
    sizes = sorted({one for layer in facts.parameters for one in layer})
    number = sum(map(len, facts.parameters))
    one = trained_bytes(sizes[-1], optim, dtype=dtype)
    each = f"each {size_text(one.kept)}" if len(sizes) == 1 else f"the largest {size_text(one.kept)}"
    each += f" (weights {size_text(one.weights)}, gradients {size_text(one.gradients)}"
    each += f", optimizer {size_text(one.optimizer)})" if one.optimizer else ")"
    each += f"; gates {size_text(facts.gate_bytes)} in every worker"
    each += f"; {facts.note}" if facts.note else ""
    if not held:
        return Resolved(f"{number} in every worker", each)
    name = "worker" if place == "colocated" else "host"
    filled = [(own.number, held_bytes(own, optim, dtype=dtype).kept) for own in held]
    if len(filled) <= SHOWN_HOSTS:
        shown = [f"{name} {n}: {count}, {size_text(used)}" for n, (count, used) in enumerate(filled)]
        return Resolved(f"{number} on {len(held)} {name}s", f"{'; '.join(shown)}; {each}")
    few, many = min(filled, key=lambda pair: pair[1]), max(filled, key=lambda pair: pair[1])
    span = f"{many[0]} on each, {size_text(many[1])}"
    if few != many:
        span = f"{few[0]} to {many[0]} on each, {size_text(few[1])} to {size_text(many[1])}"
    return Resolved(f"{number} on {len(held)} {name}s", f"{span}; {each}")


def least_parts(
    model_facts: ModelFacts | None, optim: OptimConfig, *, on_gpu: bool, recomputed: bool, remote: bool = False,
    shards: int = 1,
) -> dict[str, int]:  # fmt: skip
    """The bytes that a worker certainly needs to train one row, by name. Only half of the estimated activations of a
    row count, since the estimate is for fp32 (a GPT measured 1.00 times the estimate in fp32, 0.64 times in bf16).

    `remote`: the experts, and what they keep of a row, are in other processes. `shards`: number of workers that the
    model's state is divided over.
    """
    parts = {} if on_gpu else {"the process": LEAST_PROCESS_BYTES}
    if model_facts is None:
        return parts
    facts = model_facts.experts if remote else None
    away = 0 if facts is None else facts.total
    trainable = model_facts.trainable_bytes // 4 - away
    used = trained_bytes(model_facts.parameters - away, optim, dtype="fp32", trainable=trainable)
    row = model_facts.row_bytes("fp32", recomputed=recomputed) or 0
    kept = 0 if facts is None else facts.rows_per_sample * len(facts.parameters) * facts.kept_bytes_per_row
    state = {name: value // shards for name, value in named(used, "fp32").items()}
    return {**parts, **state, "one row": max(0, row - kept) // 2}


def check_limit(
    limit: int | None, model_facts: ModelFacts | None, optim: OptimConfig, *, on_gpu: bool, recomputed: bool,
    hosts: Resolved | None = None, shards: int = 1, one_row: Choice | None = None, key: str = "cluster.memory_limit",
) -> None:  # fmt: skip
    """Refuses a memory limit, set by `key`, below what a worker certainly needs. `hosts`: where the experts are; None:
    in the workers; `one_row`: the estimate for a worker with one row, for the message."""
    away = hosts is not None and hosts.value not in ("none", 0)
    parts = least_parts(model_facts, optim, on_gpu=on_gpu, recomputed=recomputed, remote=away, shards=shards)
    least = sum(parts.values())
    if limit is not None and least > limit:
        likely = ""
        if one_row is not None and (estimated := one_row.value_or(0)) > least:
            likely = f"; {size_text(estimated)} are estimated for one row"
        raise InputError(
            key, got=f"{size_text(limit)} for each process",
            expected=f"more than {size_text(least)}, the least that a worker needs: {parts_text(parts)}{likely}",
            remedy="null uses cluster.memory_fraction instead" if key == "cluster.memory_limit" else "",
        )  # fmt: skip


def warn_over_budget(allowed: int | None, estimate: Choice, one_row: Choice, *, measured: bool) -> list[str]:
    """A warning if the estimate is above what a worker may use. It is not an error, since it is only an estimate.
    `measured`: the micro-batch is measured at the start."""
    planned, smallest = estimate.value_or(0), one_row.value_or(0)
    if allowed is None or planned <= allowed:
        return []
    if smallest > allowed:
        needed = f"{size_text(smallest)} are estimated for a worker with one row at a time"
        return [f"{needed}, but it may use {size_text(allowed)}: it will probably not fit; only the start can tell"]
    remedy = "what fits is measured at start" if measured else "lower loop.micro_batch_size"
    return [f"{size_text(planned)} are estimated for each worker, but it may use {size_text(allowed)}: {remedy}"]


def reason_to_measure(
    model_facts: ModelFacts | None, memory: Choice, allowed: int | None, *, on_gpu: bool
) -> str | None:
    """Why an `auto` micro-batch should be measured before it is used; None if it need not be."""
    if on_gpu:
        return "only a GPU's allocator knows its free memory"
    if model_facts is None or model_facts.row_bytes("fp32", recomputed=False) is None:
        tiny = model_facts is not None and model_facts.parameters < TINY_PARAMETERS
        return None if tiny else "the activations of this model are unknown"
    estimated = memory.value_or(0)
    if allowed is not None and estimated > DOUBTFUL * allowed:
        return f"{size_text(estimated)} are estimated, a worker may use {size_text(allowed)}"
    return None


def advise_activation_checkpointing(
    model_facts: ModelFacts | None, memory: Choice, allowed: int | None, loop: LoopConfig, *, rows: int
) -> list[str]:
    """Advice to set `loop.activation_checkpointing` if the activations of the `rows` that a worker keeps at the same
    time fill much of its memory."""
    if loop.activation_checkpointing or model_facts is None or not model_facts.blocks or allowed is None:
        return []
    kept = rows * (model_facts.activation_bytes_per_sample or 0)
    estimated = memory.value_or(0)
    if estimated <= RECOMPUTED_ABOVE * allowed or kept < WORTH_RECOMPUTING * estimated:
        return []
    return [
        f"{size_text(estimated)} are estimated of the {size_text(allowed)} that a worker may use,"
        f" {size_text(kept)} of it activations: loop.activation_checkpointing true keeps only the input of each of the"
        f" {len(model_facts.blocks)} blocks and costs about a third more computation"
    ]


# ---- scale.strategy: fsdp, where measurements are refused and a block is gathered at a time

UNMEASURED = "scale.strategy fsdp measures nothing: sharded workers cannot recover from an out-of-memory in place"


def micro_batch_under_fsdp(loop: LoopConfig, batches: Mapping[str, Resolved]) -> Mapping[str, Choice]:
    """`batches`; the reason of an `auto` micro-batch says what happens when memory runs out."""
    micro = batches["micro_batch_size"]
    if loop.micro_batch_size != "auto" or micro.value == 1:
        return batches
    reason = f"{micro.reason}; an out-of-memory restarts from the latest checkpoint with half of it"
    return {**batches, "micro_batch_size": replace(micro, reason=reason)}


def gathered_bytes(facts: ModelFacts, *, dtype: str, overlap: bool = False) -> int | None:
    """Bytes that are unsharded on each worker at its peak: weights and gradients of one block and of everything
    outside the blocks, and the block's gradient once more while it is reduced. None where the blocks are unknown.
    `overlap`: the next block is gathered meanwhile (on GPUs): its weights count too."""
    if not facts.blocks:
        return None
    master = 8 if dtype == "fp64" else 4
    half = 2 if dtype in ("bf16", "fp16") else master
    outside = facts.parameters - sum(facts.blocks)
    ahead = max(facts.blocks) * half if overlap and len(facts.blocks) > 1 else 0
    return max(facts.blocks) * (2 * half + master) + ahead + outside * 2 * master
