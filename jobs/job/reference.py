"""`loop.reference: true`: the reference path, which disables every optimization of speed or memory at once.

Use it to find out whether an optimization causes a problem; `bench` uses it as its baseline. Each optimization also has
a key of its own. The values of this table override those of the job.
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
"""Key -> its value on the reference path. `precision.dtype: fp64` is kept, since it is more exact still."""


def as_reference(spec: JobSpec) -> tuple[JobSpec, set[str]]:
    """The job on the reference path, and the keys whose values changed."""
    changed: set[str] = set()
    has_experts = (spec.model.builder or "").startswith("experts.") or spec.experts.num_experts is not None
    for key, reference in PLAIN.items():
        section, name = key.split(".")
        if section == "experts" and not has_experts:
            continue
        current = getattr(spec, section)
        value = getattr(current, name)
        if value == reference or value == "fp64":
            continue
        changed.add(key)
        spec = spec.model_copy(update={section: current.model_copy(update={name: reference})})
    return spec, changed
