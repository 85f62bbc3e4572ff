"""`loop.reference: true`: the plain path, with everything that makes a step faster or smaller switched off at once.

It is the way back where one of these is suspected, and what `bench` compares with. Each has its own key too; what this
table says wins over what the job says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.job.spec import JobSpec

PLAIN: dict[str, Any] = {
    "loop.compile": "off",
    "loop.activation_checkpointing": False,
    "loop.cudnn_benchmark": False,
    "loop.mask_cache_mb": 0.0,
    "optim.fused": False,
    "data.storage": "stream",
    "experts.inflight": 1,
    "scale.overlap": False,
    "precision.dtype": "fp32",
    "precision.fp32_layers": [],
}
"""Key -> its value on the plain path. `precision.dtype: fp64` stays, which is plainer still."""


def as_reference(spec: JobSpec) -> tuple[JobSpec, set[str]]:
    """The job on the plain path, and the keys whose values that changed."""
    changed: set[str] = set()
    has_experts = (spec.model.builder or "").startswith("experts.") or spec.experts.num_experts is not None
    for key, plain in PLAIN.items():
        section, name = key.split(".")
        if section == "experts" and not has_experts:
            continue
        current = getattr(spec, section)
        value = getattr(current, name)
        if value == plain or value == "fp64":
            continue
        changed.add(key)
        spec = spec.model_copy(update={section: current.model_copy(update={name: plain})})
    return spec, changed
