"""What is known about a job's model and data without torch: sizes by formula and from headers, use of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.job.spec import JobSpec
from raytrain.plan.facts import DataFacts, ModelFacts


def facts_of_data(spec: JobSpec) -> DataFacts | None:
    """Sizes of the data without reading all of it; None if the data must be opened to know them."""
    from raytrain.data.sources.describe import check_label, describe_source

    check_label(spec.data, builder=spec.model.builder)
    return describe_source(spec.data, context=spec.model.keys.get("context"))


def shapes_of_data(spec: JobSpec, data_facts: DataFacts | None) -> dict[str, Any]:
    """The facts of the data that a builder may take (vocab_size, ...), as far as known without opening the data."""
    from raytrain.data.sources.describe import describe_shapes

    shapes = describe_shapes(spec.data)
    if data_facts is not None and data_facts.vocab_size is not None:
        shapes["vocab_size"] = data_facts.vocab_size
    return shapes


def formula_facts(spec: JobSpec, shapes: Mapping[str, Any]) -> ModelFacts | None:
    """Sizes of a built-in model by formula; None for other models, or if `shapes` lacks a needed value."""
    from experts.plan.sizes import expert_facts
    from raytrain.models.sizes import model_facts

    builder, keys = spec.model.builder, spec.model.keys
    if builder is None:
        return None
    return model_facts(builder, keys, shapes) or expert_facts(builder, keys, shapes, spec.experts)


def facts_of_model(spec: JobSpec, shapes: Mapping[str, Any]) -> ModelFacts | None:
    """Sizes of a built-in model by formula, or of a Hugging Face model from the headers of its files."""
    from raytrain.models.huggingface.folder import folder_facts

    return formula_facts(spec, shapes) or folder_facts(spec.model.builder, spec.model.keys)


def configured_hosts(spec: JobSpec) -> Any:
    """`experts.hosts`; None for a dense model. `auto` is 0 for a user's own builder, which may not use hosts."""
    if not has_experts(spec):
        return None
    ours = (spec.model.builder or "").startswith("experts.")
    return spec.experts.hosts if ours or spec.experts.hosts != "auto" else 0


def uses_hosts(spec: JobSpec) -> bool:
    """Whether a user's own builder must move its experts to hosts; built-in expert models always do."""
    ours = (spec.model.builder or "").startswith("experts.")
    return not ours and configured_hosts(spec) not in (None, 0)


def has_experts(spec: JobSpec) -> bool:
    """Whether the model is a built-in one with experts, or a user's whose job sets their number or hosts."""
    builder, asked = spec.model.builder or "", spec.experts
    configured = asked.num_experts is not None or asked.hosts not in ("auto", 0)
    return builder.startswith("experts.") or (configured and not builder.startswith("raytrain."))
