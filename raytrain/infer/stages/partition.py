"""Which parts of a model each stage holds, from the memory that they need while they answer; without torch.

Called on the driver by `jobs.inference.layout`, and by each stage to know its own parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from raytrain.config.messages import abbreviated, suggestion
from raytrain.errors import InputError
from raytrain.plan.choice import size_text

KEY, MAP, POLICY = "infer.stages", "infer.stage_map", "infer.stage_policy"
NAMED_AT_MOST = 5
_RANGE = re.compile(r"(?:(.+)\.)?(\d+)(?:-(\d+))?")
#: Bytes of a logit while a token is chosen from it: itself, and its float64 copy.
LOGIT_BYTES = 12


@dataclass(frozen=True)
class ModelPart:
    """A module that a forward pass calls once, with everything that crosses a cut before it as its first argument."""

    name: str  # in the model, such as `blocks.0`
    bytes: int  # of its parameters; those of the first part include parameters of no other part
    repeated: bool = False  # whether it is one of the model's repeated blocks, whose numbers a map may use alone
    # its modules by name, if there are several: all that come before the repeated blocks are one part
    modules: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.modules or (self.name,)


@dataclass(frozen=True)
class StagePlan:
    """Contiguous runs of parts, one for each stage."""

    parts: tuple[ModelPart, ...]  # all parts in the order of a forward pass
    bounds: tuple[int, ...]  # stage k holds the parts `bounds[k]` to `bounds[k + 1]`

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def bytes(self) -> list[int]:
        return [sum(part.bytes for part in self.parts[a:b]) for a, b in pairwise(self.bounds)]

    def describe(self, stage: int) -> str:
        """What a stage holds: `blocks.0 to blocks.3, 12.0 MB`."""
        own = self.parts[self.bounds[stage] : self.bounds[stage + 1]]
        names = own[0].name if len(own) == 1 else f"{own[0].name} to {own[-1].name}"
        return f"{names}, {size_text(self.bytes[stage])}"


def plan_stages(
    parts: Sequence[ModelPart], stages: int, *, policy: str = "auto", limit: int | None = None
) -> StagePlan:
    """Divide parts over stages. Raises InputError: fewer parts than stages, or parts that do not fit the limit.

    Args:
        policy: `balanced` (also `auto`) makes the largest stage as small as possible; `balanced_low_0` leaves the first
            stage what comes before the repeated blocks and balances the rest; `sequential` fills each stage up to the
            limit before the next one.
        limit: bytes of weights that a stage may hold.
    """
    if stages > len(parts):
        raise InputError(KEY, got=str(stages), expected=f"at most {len(parts)}, the parts of the model in order")
    sizes = [part.bytes for part in parts]
    if policy == "sequential":
        bounds = [0]  # of stages that are each filled up to the limit; every later one keeps at least one part
        for left in reversed(range(1, stages)):
            at, held = bounds[-1], 0
            while at < len(sizes) - left and (at == bounds[-1] or limit is None or held + sizes[at] <= limit):
                held += sizes[at]
                at += 1
            bounds.append(at)
        bounds.append(len(sizes))
    elif policy == "balanced_low_0" and stages > 1:
        first = next((at for at, part in enumerate(parts) if part.repeated), 1)
        first = min(max(first, 1), len(parts) - stages + 1)
        rest = _balanced(sizes[first:], stages - 1)
        bounds = [0, *(first + end for end in rest)]
    else:
        bounds = _balanced(sizes, stages)
    plan = StagePlan(tuple(parts), tuple(bounds))
    if limit is not None and max(plan.bytes) > limit:
        at = plan.bytes.index(max(plan.bytes))
        raise InputError(
            KEY, got=f"{stages} stages, of which stage {at} holds {plan.describe(at)}",
            expected=f"at most {size_text(limit)} of weights on each device",
            remedy="use more stages, or devices with more memory",
        )  # fmt: skip
    return plan


def _balanced(sizes: Sequence[int], stages: int) -> list[int]:
    """Bounds that make the largest stage as small as possible; dynamic programming over cuts."""
    count, ends = len(sizes), [0, *accumulate(sizes)]
    best = list(ends)
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        found, chosen = list(best), [0] * (count + 1)
        for end in range(stage + 1, count + 1):
            choices = [(max(best[cut], ends[end] - ends[cut]), cut) for cut in range(stage, end)]
            found[end], chosen[end] = min(choices, key=lambda one: one[0])
        best, cuts = found, [*cuts, chosen]
    bounds = [count]
    for chosen in reversed(cuts):
        bounds.append(chosen[bounds[-1]])
    return [*reversed([*bounds, 0])]


def fewest_stages(
    parts: Sequence[ModelPart], room: Callable[[int], int], *, most: int, policy: str = "auto"
) -> StagePlan:
    """The plan with the fewest stages, at least two, that fits. `room`: number of stages -> bytes of weights that
    each device has room for. `most`: devices of a replica at most. Raises InputError: it does not fit any number of
    stages; the message says what is largest."""
    for stages in range(2, min(most, len(parts)) + 1):
        try:
            return plan_stages(parts, stages, policy=policy, limit=room(stages))
        except InputError:
            continue
    largest, total = max(parts, key=lambda part: part.bytes), sum(part.bytes for part in parts)
    raise InputError(
        KEY, got=f"weights of {size_text(total)}, the largest part {largest.name} with {size_text(largest.bytes)}",
        expected=f"room for at most {size_text(max(room(most), 0))} of weights on each of {most} devices",
        remedy="use more devices, a smaller infer.batch_size or infer.inflight, or fewer infer.max_new_tokens",
    )  # fmt: skip


# ---------------------------------------------------------------- a map of the user's


def mapped_stages(parts: Sequence[ModelPart], lists: Sequence[str]) -> StagePlan:
    """The plan that a user gives: for each stage the names of its parts, such as `tokens, blocks.0-10`.

    A number or a range alone means repeated blocks, and a name may be the end of the full one (`norm` for
    `model.norm`). Raises InputError: with everything that is wrong: unknown names, parts of two stages, of none, or
    in another order."""
    wrong = list[str]()
    chosen: list[list[int]] = []
    for text in lists:
        own: list[int] = []
        for name in filter(None, (one.strip() for one in text.split(","))):
            places = _places(parts, name)
            if not places:
                wrong.append(f"no part {name}{suggestion(name, [part.name for part in parts], form=' (like {})')}")
            own.extend(place for place in places if len(parts[place].names) == 1 or place not in own)
        chosen.append(own)
    stages_of: dict[int, list[int]] = {}
    for stage, own in enumerate(chosen):
        for place in own:
            stages_of.setdefault(place, []).append(stage)
    several = {at: " and ".join(map(str, found)) for at, found in stages_of.items() if len(found) > 1}
    twice = [f"{parts[at].name} in stages {found}" for at, found in several.items()]
    missing = [part.name for at, part in enumerate(parts) if at not in stages_of]
    empty = [str(stage) for stage, own in enumerate(chosen) if not own]
    wrong += twice[:NAMED_AT_MOST]
    if missing:
        wrong.append(f"no stage for {abbreviated(missing, NAMED_AT_MOST)}")
    wrong += [f"nothing in stage {stage}" for stage in empty]
    order = [place for own in chosen for place in own]
    if not wrong and order != sorted(order):
        at = next(at for at, (a, b) in enumerate(pairwise(order)) if a > b)
        wrong.append(f"{parts[order[at + 1]].name} after {parts[order[at]].name}")
    if wrong:
        raise InputError(
            MAP, got="; ".join(wrong), expected=f"every part once, in order: {_overview(parts)}",
        )  # fmt: skip
    bounds = [0]
    for own in chosen:
        bounds.append(bounds[-1] + len(own))
    return StagePlan(tuple(parts), tuple(bounds))


def _places(parts: Sequence[ModelPart], name: str) -> list[int]:
    """The parts that an entry of a map means, in its order."""
    exact = [at for at, part in enumerate(parts) if name in part.names]
    if exact:
        return exact
    numbered = _RANGE.fullmatch(name)
    if numbered is None:
        found = [at for at, part in enumerate(parts) if any(one.endswith(f".{name}") for one in part.names)]
        return found if len(found) == 1 else []
    prefix, low = numbered[1], int(numbered[2])
    high = low if numbered[3] is None else int(numbered[3])
    blocks = [at for at, part in enumerate(parts) if part.repeated]
    if prefix is not None:
        of_list = [at for at, part in enumerate(parts) if part.name.rpartition(".")[0] == prefix]
        blocks = of_list or [at for at, part in enumerate(parts) if part.name.rpartition(".")[0].endswith(f".{prefix}")]
    by_number = {int(leaf): at for at in blocks if (leaf := parts[at].name.rpartition(".")[2]).isdigit()}
    numbers = range(low, high + 1)
    if low > high or not all(number in by_number for number in numbers):
        return []
    return [by_number[number] for number in numbers]


def _overview(parts: Sequence[ModelPart]) -> str:
    """All parts in order; a run of repeated blocks as a range."""
    texts: list[str] = []
    at = 0
    while at < len(parts):
        end = at
        while end + 1 < len(parts) and parts[at].repeated and parts[end + 1].repeated:
            end += 1
        last = parts[end].name.rpartition(".")[2]
        texts.append(parts[at].name if end == at else f"{parts[at].name}-{last}")
        at = end + 1
    return abbreviated(texts, 3 * NAMED_AT_MOST)


# ---------------------------------------------------------------- memory of a whole copy


@dataclass(frozen=True)
class DecoderSizes:
    """What the caches and activations of a language model depend on."""

    layers: int  # blocks that attend
    width: int  # of the residual stream
    hidden: int  # values of a token inside the feed-forward
    cached: int  # keys of a token in a layer; as many values
    vocabulary: int  # logits of a token
    context: int | None = None  # most tokens that the model sees; None = no limit


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes of a whole copy of a model."""

    weights: int  # of the parameters
    cache: int = 0  # of the keys and values of one batch at its longest
    activations: int = 0  # of one pass over the prompts

    @property
    def total(self) -> int:
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
