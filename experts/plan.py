"""Sizes of the built-in mixture-of-experts models by formula, and the checks of their keys; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experts.config import ExpertsConfig
from raytrain.errors import InputError
from raytrain.models.sizes import (
    FLOAT_BYTES,
    BuilderKeys,
    SizeError,
    check_counts,
    check_dropout,
    check_gpt,
    facts,
    gpt_activations,
    gpt_parameters,
    known_facts,
    language_flops,
)
from raytrain.plan import ModelFacts
from raytrain.plan_values import ExpertFacts

DEFAULT_EXPERTS = 4


def check_experts(experts: ExpertsConfig) -> int:
    """The number of experts per layer. Raises InputError naming `experts.top_k` where more are asked for."""
    number = DEFAULT_EXPERTS if experts.num_experts is None else experts.num_experts
    if experts.top_k > number:
        raise InputError(
            "experts.top_k",
            seen=str(experts.top_k),
            expected=f"at most the number of experts ({number})",
            remedy="raise experts.num_experts or lower experts.top_k",
        )
    return number


def expert_hidden(experts: ExpertsConfig, width: int) -> int:
    """F, the hidden width of one expert: 4 x width where it is not given."""
    return 4 * width if experts.hidden is None else experts.hidden


def check_moe_mlp(
    *, width: Any, layers: Any, num_features: Any, num_classes: Any, dropout: Any
) -> tuple[int, int]:
    """(features, classes) of a `moe_mlp`. Raises SizeError for keys that cannot be built."""
    if num_features is None:
        raise SizeError("num_features", seen="null", expected="a number, as this source does not say it")
    classes = 1 if num_classes is None else num_classes
    check_counts(width=width, layers=layers, num_features=num_features, num_classes=classes)
    check_dropout(dropout)
    return num_features, classes


def layer_parameters(width: int, experts: ExpertsConfig, *, active: bool = False) -> int:
    """Parameters of one MoELayer, router included; with `active` those one token meets."""
    number = check_experts(experts)
    used = (experts.top_k if active else number) + experts.shared_expert
    return number * width + used * expert_parameters(width, experts)


def expert_parameters(width: int, experts: ExpertsConfig) -> int:
    """Parameters of one expert."""
    return (3 if experts.activation == "swiglu" else 2) * width * expert_hidden(experts, width)


def layer_activations(width: int, experts: ExpertsConfig) -> int:
    """Numbers per token that autograd keeps for one MoELayer.

    Per choice: its row, its hidden values before and after the activation, its result unsorted, and its
    int64 places; per expert the scores; the router's input is the norm's output, counted there.
    """
    hidden = expert_hidden(experts, width)
    inner = (4 if experts.activation == "swiglu" else 2) * hidden
    routed = experts.top_k * (2 * width + inner + 12) + 3 * check_experts(experts)
    return routed + (inner if experts.shared_expert else 0)


def parts_elsewhere(layers: int, width: int, experts: ExpertsConfig, *, tokens: int) -> ExpertFacts:
    """What may live on hosts: its sizes, and what travels there. `tokens` of one sample."""
    number, hidden = check_experts(experts), expert_hidden(experts, width)
    inner = (4 if experts.activation == "swiglu" else 2) * hidden
    return ExpertFacts(
        parameters=((expert_parameters(width, experts),) * number,) * layers,
        gate_bytes=layers * gate_bytes(width, number),
        rows_per_sample=experts.top_k * tokens,
        row_bytes=FLOAT_BYTES * width,
        kept_bytes_per_row=FLOAT_BYTES * (width + inner),
    )


def gate_bytes(width: int, number: int) -> int:
    """Of one router: a row of weights for each expert, its bias and its share."""
    return FLOAT_BYTES * number * (width + 2)


def moe_gpt_flops(*, layers: int, width: int, context: int, vocab_size: int, experts: ExpertsConfig) -> float:
    """Forward and backward of one full window; only the experts a token visits count."""
    sizes = {"layers": layers, "width": width, "context": context}
    active = gpt_parameters(
        **sizes, vocab_size=vocab_size, feed_forward=layer_parameters(width, experts, active=True)
    )
    return language_flops(**sizes, matmul_parameters=active - context * width)


def moe_mlp_flops(*, width: int, layers: int, features: int, classes: int, experts: ExpertsConfig) -> float:
    """Forward and backward of one row."""
    return 6.0 * ((features + classes) * width + layers * layer_parameters(width, experts, active=True))


def _moe_gpt_facts(*, experts: ExpertsConfig, **keys: Any) -> ModelFacts:
    check_gpt(**keys)
    layers, width, context, vocab = (keys[k] for k in ("layers", "width", "context", "vocab_size"))
    sizes = {"layers": layers, "width": width, "context": context, "vocab_size": vocab}
    parameters = gpt_parameters(**sizes, feed_forward=layer_parameters(width, experts))
    activations = gpt_activations(
        **sizes,
        heads=keys["heads"],
        dropout=keys["dropout"],
        feed_forward=layer_activations(width, experts),
    )
    flops = moe_gpt_flops(**sizes, experts=experts)
    reason = f"formula of moe_gpt, {check_experts(experts)} experts a layer"
    found = facts(parameters, activations, flops, reason)
    return replace(found, experts=parts_elsewhere(layers, width, experts, tokens=context))


def _moe_mlp_facts(*, experts: ExpertsConfig, **keys: Any) -> ModelFacts:
    check_moe_mlp(**keys)
    layers, width, features = keys["layers"], keys["width"], keys["num_features"]
    classes = keys["num_classes"] or 1
    layer = layer_parameters(width, experts) + 2 * width
    parameters = (features + 1) * width + layers * layer + (width + 1) * classes
    kept = features + 2 * width + layers * (2 * width + layer_activations(width, experts)) + classes
    flops = moe_mlp_flops(width=width, layers=layers, features=features, classes=classes, experts=experts)
    reason = f"formula of moe_mlp, {check_experts(experts)} experts a layer"
    found = facts(parameters, FLOAT_BYTES * kept, flops, reason)
    return replace(found, experts=parts_elsewhere(layers, width, experts, tokens=1))


EXPERT_BUILDERS = {
    "experts.models:moe_gpt": BuilderKeys(
        ("layers", "heads", "width", "context", "vocab_size"), {"dropout": 0.0}, _moe_gpt_facts
    ),
    "experts.models:moe_mlp": BuilderKeys(
        (),
        {"width": 128, "layers": 2, "num_features": None, "num_classes": None, "dropout": 0.0},
        _moe_mlp_facts,
    ),
}


def expert_facts(
    builder: str, keys: Mapping[str, Any], source_facts: Mapping[str, Any], experts: ExpertsConfig
) -> ModelFacts | None:
    """Sizes of a built-in mixture-of-experts model; arguments and errors as `model_facts`.

    Returns None for any other builder, and where only the opened source can tell a size.
    """
    known = EXPERT_BUILDERS.get(builder)
    return known_facts(builder, known, keys, source_facts, experts=experts) if known else None
