"""Plan rules of `scale.strategy: fsdp`: what it decides otherwise, what it refuses, and a worker's bytes.

Pure: sections, facts and decisions in, choices out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raytrain.config.sections import LoopConfig, PrecisionConfig, ScaleConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Choice, Deferred, Resolved
from raytrain.plan.facts import ModelFacts

KEY = "scale.strategy"
UNMEASURED = "scale.strategy fsdp measures nothing: an out-of-memory cannot be undone among shards"


def hosts_under_fsdp(asked: Any) -> Resolved:
    """Experts are sharded as the rest is.

    Args:
        asked: `experts.hosts`.

    Raises:
        InputError: hosts.
    """
    if asked in (0, "auto"):
        return Resolved(0, "scale.strategy fsdp: every worker holds its rows of all experts")
    raise InputError(
        "experts.hosts", seen=str(asked), expected="0 or auto with scale.strategy fsdp",
        remedy="hosts of experts beside sharded workers are not built yet; scale.strategy expert_parallel has hosts",
    )  # fmt: skip


def refuse_unmeasured(scale: ScaleConfig, precision: PrecisionConfig) -> None:
    """Raises InputError for what only a measurement could decide, which `fsdp` does not make."""
    if scale.strategy == "fsdp" and precision.fp32_layers == "auto":
        raise InputError(
            "precision.fp32_layers", seen="auto with scale.strategy fsdp", expected="a list of layers, or null",
            remedy=UNMEASURED,
        )  # fmt: skip


def precision_under_fsdp(scale: ScaleConfig, chosen: Choice, *, on_gpu: bool) -> Choice:
    """Under `fsdp` what others would measure is decided by the device alone."""
    if scale.strategy != "fsdp" or not isinstance(chosen, Deferred):
        return chosen
    if on_gpu and "bf16" in chosen.bounds and chosen.reason.startswith("CUDA"):
        return Resolved("bf16", f"{chosen.reason}; {UNMEASURED}")
    return Resolved("fp32", f"{UNMEASURED}; precision.dtype {chosen.bounds[0]} asks for less")


def micro_batch_under_fsdp(loop: LoopConfig, batches: Mapping[str, Resolved]) -> Mapping[str, Choice]:
    """`batches` as they are; an `auto` micro-batch says what becomes of it when memory runs out."""
    micro = batches["micro_batch_size"]
    if loop.micro_batch_size != "auto" or micro.value == 1:
        return batches
    told = f"{micro.reason}; an out-of-memory restarts from the newest checkpoint with half of it"
    return {**batches, "micro_batch_size": replace(micro, reason=told)}


def gathered_bytes(facts: ModelFacts, *, dtype: str) -> int | None:
    """Bytes of what is whole on each worker at its peak: one block and what is outside the blocks, weights and
    gradients, and the block's gradient once more as it is summed. None where nobody knows the blocks."""
    if not facts.blocks:
        return None
    master = 8 if dtype == "fp64" else 4
    half = 2 if dtype in ("bf16", "fp16") else master
    outside = facts.parameters - sum(facts.blocks)
    return max(facts.blocks) * (2 * half + master) + outside * 2 * master
