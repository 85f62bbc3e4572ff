"""Memory of a model that answers: weights, key/value caches and the activations of one pass, by formula. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raytrain.plan.text import size_text

#: Bytes of a logit while a token is chosen from it: itself, and its float64 copy.
LOGIT_BYTES = 12


@dataclass(frozen=True)
class DecoderSizes:
    """What the caches and activations of a language model depend on.

    Attributes:
        layers: blocks that attend.
        width: of the residual stream.
        hidden: values of a token inside the feed-forward.
        cached: keys of a token in a layer; as many values.
        vocabulary: logits of a token.
        context: most tokens that the model sees; None = no limit.
    """

    layers: int
    width: int
    hidden: int
    cached: int
    vocabulary: int
    context: int | None = None


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes of a whole copy of a model.

    Attributes:
        weights: of the parameters.
        cache: of the keys and values of one batch at its longest.
        activations: of one pass over the prompts.
    """

    weights: int
    cache: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All of them together."""
        return self.weights + self.cache + self.activations

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("key/value cache", self.cache), ("activations", self.activations))
        return " + ".join(f"{name} {size_text(size)}" for name, size in parts if size)


def inference_memory(
    weights: int, sizes: DecoderSizes | None, *, rows: int, tokens: int, value_bytes: int
) -> InferenceMemory:
    """The estimate for batches of `rows` rows of `tokens` tokens, answers included.

    Args:
        weights: bytes of the parameters as they are loaded.
        sizes: None for a model whose sizes are not known: then only its weights count.
        value_bytes: of an activation and of a cached key: 2 in half precision, else 4.
    """
    if sizes is None:
        return InferenceMemory(weights)
    tokens = tokens if sizes.context is None else min(tokens, sizes.context)
    cache = 2 * sizes.layers * sizes.cached * rows * tokens * value_bytes
    # the residual stream and its norm, and either queries, keys, values and their result, or two hidden layers
    each = 2 * sizes.width + max(4 * sizes.width, 2 * sizes.hidden)
    return InferenceMemory(weights, cache, rows * (tokens * each * value_bytes + sizes.vocabulary * LOGIT_BYTES))


def sizes_of_keys(keys: Mapping[str, Any], facts: Mapping[str, Any]) -> DecoderSizes | None:
    """Of the built-in GPT and its mixture-of-experts variant, from the keys of their builders; None for others."""
    known = {**facts, **keys}
    layers, width, vocabulary = (known.get(name) for name in ("layers", "width", "vocab_size"))
    if not isinstance(layers, int) or not isinstance(width, int) or not isinstance(vocabulary, int):
        return None
    context = known.get("context")
    return DecoderSizes(layers, width, 4 * width, width, vocabulary, context if isinstance(context, int) else None)


def sizes_of_config(config: Mapping[str, Any]) -> DecoderSizes | None:
    """Of a model of transformers, from its config.json; None if it does not say them."""
    inner = config.get("text_config")
    own = inner if isinstance(inner, Mapping) else config

    def first(*names: str) -> Any:
        return next((own[name] for name in names if isinstance(own.get(name), int)), None)

    layers, width = first("num_hidden_layers", "n_layer", "num_layers"), first("hidden_size", "n_embd", "d_model")
    heads, vocabulary = first("num_attention_heads", "n_head", "num_heads"), first("vocab_size")
    if not all((layers, width, heads, vocabulary)):
        return None
    head = first("head_dim") or width // heads
    return DecoderSizes(
        layers, width, first("intermediate_size", "n_inner", "ffn_dim") or 4 * width,
        (first("num_key_value_heads") or heads) * head, vocabulary,
        first("max_position_embeddings", "n_positions", "n_ctx"),
    )  # fmt: skip
