"""Plan rules of `scale.strategy: fsdp`: what it decides differently, what it refuses, and the gathered bytes.

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
UNMEASURED = "scale.strategy fsdp measures nothing: sharded workers cannot recover from an out-of-memory in place"


def hosts_under_fsdp(requested: Any) -> Resolved:
    """Where the experts are: sharded like the rest of the model.

    Args:
        requested: `experts.hosts`.

    Raises:
        InputError: expert hosts are configured.
    """
    if requested in (0, "auto"):
        return Resolved(0, "scale.strategy fsdp: every worker holds its rows of all experts")
    raise InputError(
        "experts.hosts", got=str(requested), expected="0 or auto with scale.strategy fsdp",
        remedy="expert hosts with sharded workers are not supported yet; scale.strategy expert_parallel has hosts",
    )  # fmt: skip


def refuse_unmeasured(scale: ScaleConfig, precision: PrecisionConfig) -> None:
    """Raises InputError for a choice that needs a measurement, since `fsdp` measures nothing."""
    if scale.strategy == "fsdp" and precision.fp32_layers == "auto":
        raise InputError(
            "precision.fp32_layers", got="auto with scale.strategy fsdp", expected="a list of layers, or null",
            remedy=UNMEASURED,
        )  # fmt: skip


def precision_under_fsdp(scale: ScaleConfig, chosen: Choice, *, on_gpu: bool) -> Choice:
    """Under `fsdp`, the device alone decides a precision that other strategies measure."""
    if scale.strategy != "fsdp" or not isinstance(chosen, Deferred):
        return chosen
    if on_gpu and "bf16" in chosen.bounds and chosen.reason.startswith("CUDA"):
        return Resolved("bf16", f"{chosen.reason}; {UNMEASURED}")
    return Resolved("fp32", f"{UNMEASURED}; set precision.dtype {chosen.bounds[0]} for half precision")


def micro_batch_under_fsdp(loop: LoopConfig, batches: Mapping[str, Resolved]) -> Mapping[str, Choice]:
    """`batches`; the reason of an `auto` micro-batch says what happens when memory runs out."""
    micro = batches["micro_batch_size"]
    if loop.micro_batch_size != "auto" or micro.value == 1:
        return batches
    reason = f"{micro.reason}; an out-of-memory restarts from the latest checkpoint with half of it"
    return {**batches, "micro_batch_size": replace(micro, reason=reason)}


def gathered_bytes(facts: ModelFacts, *, dtype: str, overlap: bool = False) -> int | None:
    """Bytes that are unsharded on each worker at its peak: weights and gradients of one block and of everything outside
    the blocks, and the block's gradient once more while it is reduced. None where the blocks are unknown.

    Args:
        overlap: the next block is gathered meanwhile (on GPUs): its weights count too.
    """
    if not facts.blocks:
        return None
    master = 8 if dtype == "fp64" else 4
    half = 2 if dtype in ("bf16", "fp16") else master
    outside = facts.parameters - sum(facts.blocks)
    ahead = max(facts.blocks) * half if overlap and len(facts.blocks) > 1 else 0
    return max(facts.blocks) * (2 * half + master) + ahead + outside * 2 * master
