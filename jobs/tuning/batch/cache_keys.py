"""What earlier figures are known by: all that a measurement depends on, and what a numeric gate depends on besides."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from jobs.driver.checks import Checked
from jobs.job.spec import JobSpec
from jobs.plan import has_experts
from jobs.tuning.batch.device_kinds import Kind
from raytrain.autotune.search.signature import make_signature
from raytrain.config.decode import encode

if TYPE_CHECKING:
    from jobs.tuning.batch.command import BatchSearch


def cache_key(spec: JobSpec, search: BatchSearch, checked: Checked, kind: Kind) -> dict[str, Any]:
    """All that a measurement depends on, as far as the driver knows it, and nothing else: neither the global batch nor
    the budget."""
    data = checked.data_facts
    signature = make_signature(
        model=search.alone_spec.model,
        optim=spec.optim,
        loop=spec.loop,
        experts=search.alone_spec.experts if has_experts(spec) else None,
        parameters=checked.model_facts.parameters,
        longest_row=data.tokens_per_row or data.row_bytes,
        device=kind.device,
        device_bytes=kind.device_bytes,
        threads=int(search.alone_plan.threads.value),  # type: ignore[union-attr]
        workers=search.workers,
        versions={name: metadata.version(name) for name in ("torch", "raytrain")},
    )
    return {**signature.facts, "data": encode(search.alone_spec)["data"], "fp32_layers": spec.precision.fp32_layers}


def gate_key(search: BatchSearch) -> dict[str, Any]:
    """What the result of a numeric gate depends on besides: all that says how its steps move the weights, and by which
    loss they are judged."""
    spec, max_steps = encode(search.alone_spec), search.alone_plan.max_steps.value  # type: ignore[union-attr]
    sections = {name: spec[name] for name in ("seed", "optim", "experts")}
    steps = {"max_steps": max_steps, "gate_steps": search.space.gate_steps}
    return {**sections, **steps, "reference": search.space.lead}
