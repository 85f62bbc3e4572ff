"""Sizes of the built-in dense models by formula, and checks of their keys. Torch-free.

`raytrain plan` does not import torch, so the keys of the builders and the sizes of their models are defined here;
the builders use the same checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from raytrain.config.messages import describe, suggestion
from raytrain.errors import InputError, mismatch
from raytrain.plan.facts import ModelFacts

FLOAT_BYTES = 4
"""Master weights and the estimate of activations are in fp32."""

SOURCE_KEYS = ("vocab_size", "num_features", "num_classes", "image_shape")
"""Builder keys that the source fills in if they are not given."""

ROW_BUILDERS = ("raytrain.models.mlp:mlp", "raytrain.models.cnn:cnn", "experts.models:moe_mlp")
"""The built-in models of rows, which read the columns x and labels of a batch."""

STAND_INS = {"vocab_size": 1, "num_features": 1, "num_classes": 1, "image_shape": (1, 1 << 20, 1 << 20)}
"""A valid value of each, with which the other keys are checked before the source is opened."""

CLASSES_UNREAD = "classes_unread"
"""Among the facts of a source: its labels may be classes, and their number is not known yet."""


class SizeError(ValueError):
    """A key of a built-in builder has an invalid value; `key` is its name without the section."""

    def __init__(self, key: str, *, got: str, expected: str) -> None:
        self.key, self.got, self.expected = key, got, expected
        super().__init__(mismatch(key, got=got, expected=expected))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SizeError, self.key, got=self.got, expected=self.expected), ()


def check_counts(**values: Any) -> None:
    """Raise SizeError for the first value that is not a whole number of at least 1."""
    for key, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SizeError(key, got=describe(value), expected="an integer >= 1")


def check_count_list(key: str, values: Any) -> list[int]:
    """Return a list of whole numbers of at least 1, or one such number, as a list. Raises SizeError."""
    listed = [values] if isinstance(values, int) else values
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise SizeError(key, got=describe(values), expected="a list of integers >= 1")
    for value in listed:
        check_counts(**{key: value})
    return list(listed)


def check_dropout(dropout: Any) -> None:
    """Raise SizeError unless `dropout` is a number in [0, 1)."""
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise SizeError("dropout", got=describe(dropout), expected="a number >= 0 and < 1")


def check_gpt(
    *, layers: Any, heads: Any, width: Any, context: Any, dropout: Any, vocab_size: Any, window: Any = None
) -> None:
    check_counts(layers=layers, heads=heads, width=width, context=context, vocab_size=vocab_size)
    check_counts(window=1 if window is None else window)
    if width % heads:
        raise SizeError("width", got=str(width), expected=f"a multiple of heads ({heads})")
    check_dropout(dropout)


def check_mlp(*, hidden: Any, num_features: Any, num_classes: Any, dropout: Any) -> list[int]:
    """Return the widths of an `mlp`, including input and output. Raises SizeError."""
    if num_features is None:
        raise SizeError("num_features", got="null", expected="a number, as this source does not provide it")
    check_counts(num_features=num_features, num_classes=1 if num_classes is None else num_classes)
    check_dropout(dropout)
    return [num_features, *check_count_list("hidden", hidden), num_classes or 1]


def check_cnn(*, channels: Any, image_shape: Any, num_classes: Any, dropout: Any) -> tuple[int, int, int]:
    """Return the image of a `cnn` as (C, H, W). Raises SizeError, also if pooling shrinks it to nothing."""
    if image_shape is None:
        raise SizeError("image_shape", got="null", expected="[H, W] or [C, H, W], as this source does not provide it")
    shape = check_count_list("image_shape", image_shape)
    if len(shape) not in (2, 3):
        raise SizeError("image_shape", got=describe(image_shape), expected="[H, W] or [C, H, W]")
    depth, height, width = [1, *shape] if len(shape) == 2 else shape
    check_counts(num_classes=1 if num_classes is None else num_classes)
    check_dropout(dropout)
    stages = len(check_count_list("channels", channels))
    if min(height, width) >> stages < 1:
        raise SizeError(
            "channels", got=f"{stages} stages", expected=f"fewer, as each halves the image of {height} x {width}"
        )
    return depth, height, width


def language_flops(
    *, matmul_parameters: float, layers: int, width: int, context: int, window: int | None = None
) -> float:
    """FLOPs of forward and backward of one full context: 6 per parameter and token, plus attention's two products.

    With a sliding `window`, each chunk of that length attends to itself and the previous chunk.
    """
    seen = context if window is None or window >= context else min(context, 2 * window)
    return 6.0 * matmul_parameters * context + 12.0 * layers * width * context * seen


def gpt_parameters(*, layers: int, width: int, context: int, vocab_size: int, feed_forward: int) -> int:
    """Parameters of a GPT whose blocks have `feed_forward` feed-forward parameters each; tied weights count once."""
    block = gpt_block(width=width, feed_forward=feed_forward)
    return (vocab_size + context) * width + layers * block + width


def gpt_block(*, width: int, feed_forward: int) -> int:
    """Parameters of one block: attention, two norms and its feed-forward."""
    return 4 * width * width + 2 * width + feed_forward


def gpt_activations(
    *, layers: int, heads: int, width: int, context: int, vocab_size: int, dropout: float, feed_forward: float
) -> int:
    """Activation bytes of one window in fp32 at the start of backward, with `feed_forward` values per token and block.

    A block keeps the inputs and outputs of its two norms (4 D), query, key, value and result (4 D), two statistics per
    norm, and one value per head for attention. With dropout, attention keeps its S x S weights. All of this is still
    held while backward computes the gradient of the logits, which needs two more tensors of their size: `gpt_logits`.
    """
    block = 8 * width + heads + 4 + feed_forward
    if dropout:
        block += 2 * width + 3 * heads * context
    ends = 2 * width + 2 + (width if dropout else 0)
    logits = gpt_logits(context=context, vocab_size=vocab_size)
    return round(FLOAT_BYTES * context * (layers * block + ends)) + logits


def gpt_logits(*, context: int, vocab_size: int) -> int:
    """Bytes of the logits of one window, of their log-softmax and of its gradient, in fp32. In half precision they need
    the same: logits of 2 bytes, the two of the cross-entropy in fp32, and that gradient again in 2 bytes. (A GPT-2 of
    50,304 words with 16 x 1024 tokens reserved 16.7 GiB on a GPU in bf16; this estimate is 17.0.)"""
    return 3 * FLOAT_BYTES * context * vocab_size


def gpt_recomputed(
    *, layers: int, heads: int, width: int, context: int, vocab_size: int, dropout: float, feed_forward: float
) -> int:
    """The same with recomputed blocks: the inputs of all blocks, and what one block and the ends keep."""
    one = gpt_activations(
        layers=1, heads=heads, width=width, context=context, vocab_size=vocab_size, dropout=dropout,
        feed_forward=feed_forward,
    )  # fmt: skip
    return FLOAT_BYTES * context * layers * width + one


@dataclass(frozen=True)
class BuilderKeys:
    """The keys of a built-in builder, as in its signature; `facts` computes the model's sizes from them."""

    required: tuple[str, ...]
    defaults: Mapping[str, Any]
    facts: Callable[..., ModelFacts]


def _gpt_facts(**keys: Any) -> ModelFacts:
    check_gpt(**keys)
    layers, width, context, vocab = (keys[k] for k in ("layers", "width", "context", "vocab_size"))
    sizes = {"layers": layers, "width": width, "context": context}
    parameters = gpt_parameters(**sizes, vocab_size=vocab, feed_forward=8 * width * width)
    kept = {**sizes, "heads": keys["heads"], "vocab_size": vocab, "dropout": keys["dropout"], "feed_forward": 8 * width}
    flops = language_flops(**sizes, matmul_parameters=parameters - context * width, window=keys["window"])
    block = gpt_block(width=width, feed_forward=8 * width * width)
    found = facts(parameters, gpt_activations(**kept), flops, f"formula of gpt, vocabulary {vocab}")
    return replace(
        found, blocks=(block,) * layers, recomputed_bytes_per_sample=gpt_recomputed(**kept),
        full_bytes_per_sample=gpt_logits(context=context, vocab_size=vocab),
    )  # fmt: skip


def _mlp_facts(**keys: Any) -> ModelFacts:
    widths = check_mlp(**keys)
    matmuls = sum(a * b for a, b in pairwise(widths))
    kept = widths[0] + (3 if keys["dropout"] else 2) * sum(widths[1:-1]) + widths[-1]
    return facts(matmuls + sum(widths[1:]), FLOAT_BYTES * kept, 6.0 * matmuls, f"formula of mlp {widths}")


def _cnn_facts(**keys: Any) -> ModelFacts:
    depth, height, width = check_cnn(**keys)
    parameters, flops, kept = 0, 0.0, depth * height * width
    for channels in check_count_list("channels", keys["channels"]):
        parameters += (9 * depth + 1) * channels
        flops += 6.0 * 9 * depth * channels * height * width
        # the activation, then the pooled values and their int64 indices
        kept += channels * (height * width + 3 * (height // 2) * (width // 2))
        depth, height, width = channels, height // 2, width // 2
    classes, features = keys["num_classes"] or 1, depth * height * width
    parameters += (features + 1) * classes
    flops += 6.0 * features * classes
    return facts(parameters, FLOAT_BYTES * (kept + classes), flops, "formula of cnn")


def facts(parameters: int, activations: int, flops: float, reason: str) -> ModelFacts:
    return ModelFacts(
        parameters=parameters,
        trainable_bytes=FLOAT_BYTES * parameters,
        activation_bytes_per_sample=activations,
        flops_per_sample=flops,
        reason=reason,
    )


DENSE_BUILDERS = {
    "raytrain.models.gpt:gpt": BuilderKeys(
        ("layers", "heads", "width", "context", "vocab_size"), {"dropout": 0.0, "window": None}, _gpt_facts
    ),
    "raytrain.models.mlp:mlp": BuilderKeys(
        (), {"hidden": (256, 256), "num_features": None, "num_classes": None, "dropout": 0.0}, _mlp_facts
    ),
    "raytrain.models.cnn:cnn": BuilderKeys(
        (), {"channels": (32, 64), "image_shape": None, "num_classes": None, "dropout": 0.0}, _cnn_facts
    ),
}


def model_facts(builder: str, keys: Mapping[str, Any], source_facts: Mapping[str, Any]) -> ModelFacts | None:
    """Sizes of a built-in dense model ("module:function"). Returns None for any other builder, and if a size is known
    only once the source is opened. Raises InputError: an unknown key, a missing one, or an invalid value."""
    known = DENSE_BUILDERS.get(builder)
    return known_facts(builder, known, keys, source_facts) if known else None


def known_facts(
    builder: str, known: BuilderKeys, keys: Mapping[str, Any], source_facts: Mapping[str, Any], **sections: Any
) -> ModelFacts | None:
    """Return the sizes of one known builder; arguments and errors as in `model_facts`."""
    accepted = [*known.required, *known.defaults]
    for name in keys:
        if name not in accepted:
            raise unknown_key("model", name, builder, accepted)
    filled = {k: v for k, v in source_facts.items() if k in SOURCE_KEYS and k in accepted and v is not None}
    given = filled | dict(keys)
    for name in known.required:
        if name not in given and name not in SOURCE_KEYS:
            raise missing_key("model", name, builder, accepted)
    values = {**known.defaults, **given}
    unknown = [name for name in accepted if name in SOURCE_KEYS and values.get(name) is None]
    opened_later = bool(unknown) and unknown != ["num_classes"]
    if opened_later:
        values |= {name: STAND_INS[name] for name in unknown}
    try:
        found = known.facts(**values, **sections)
    except SizeError as error:
        raise InputError(f"model.{error.key}", got=error.got, expected=error.expected) from error
    if opened_later:
        return None
    if unknown and source_facts.get(CLASSES_UNREAD):
        return replace(found, reason=f"{found.reason}, with one output: the classes of data.label are not counted yet")
    return found


def unknown_key(section: str, name: str, function: str, accepted: Iterable[str]) -> InputError:
    """The error for a key that a builder or dataset function does not accept."""
    accepted = sorted(accepted)
    return InputError(
        f"{section}.{name}",
        got=f"a key that {function} does not accept",
        expected=f"one of {', '.join(accepted)}" if accepted else "no keys for it",
        remedy=suggestion(name, accepted, form=f"did you mean {section}.{{}}?") or f"remove {section}.{name}",
    )


def missing_key(section: str, name: str, function: str, accepted: Iterable[str]) -> InputError:
    """The error for a key that a builder or dataset function requires and that is not given."""
    return InputError(
        f"{section}.{name}",
        got="no value",
        expected=f"a value, as {function} requires it",
        remedy=f"keys of {function}: {', '.join(sorted(accepted))}",
    )
