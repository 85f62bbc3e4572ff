"""Sizes of a job's model and data by formula and from headers, as far as they can be known without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.job.spec import JobSpec
from raytrain.plan.facts import DataFacts, ModelFacts


def facts_of_data(spec: JobSpec) -> DataFacts | None:
    """Sizes of the data without reading it whole; None where only opening it can tell."""
    from raytrain.data.sources.describe import describe_source

    return describe_source(spec.data, context=spec.model.keys.get("context"))


def shapes_of_data(spec: JobSpec, data_facts: DataFacts | None) -> dict[str, Any]:
    """What a builder may take from the data (vocab_size, ...), as far as it is known without opening it."""
    from raytrain.data.sources.describe import describe_shapes

    shapes = describe_shapes(spec.data)
    if data_facts is not None and data_facts.vocab_size is not None:
        shapes["vocab_size"] = data_facts.vocab_size
    return shapes


def formula_facts(spec: JobSpec, shapes: Mapping[str, Any]) -> ModelFacts | None:
    """Sizes of a built-in model by formula; None for others, and where `shapes` does not tell enough."""
    from experts.plan.sizes import expert_facts
    from raytrain.models.sizes import model_facts

    builder, keys = spec.model.builder, spec.model.keys
    if builder is None:
        return None
    return model_facts(builder, keys, shapes) or expert_facts(builder, keys, shapes, spec.experts)


def facts_of_model(spec: JobSpec, shapes: Mapping[str, Any]) -> ModelFacts | None:
    """The same, and of a model in a folder of transformers by the headers of its files."""
    from raytrain.models.huggingface.folder import folder_facts

    return formula_facts(spec, shapes) or folder_facts(spec.model.builder, spec.model.keys)
