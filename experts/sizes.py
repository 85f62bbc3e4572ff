"""Sizes of the built-in mixture-of-experts models by formula, checks of their keys, and bytes per holder.

For the plan and the record; without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from cluster.devices.inventory import Device
from cluster.wording import size as size_text
from experts.config import DEFAULT_EXPERTS, ExpertsConfig, LayerShape, row_work, weight_shapes
from experts.placement.policy import MEMORY_SHARE, PlacementRules, costs_of_sizes, place_first
from experts.placement.values import Costs, ExpertCost, HostSpec, equal_hosts
from raytrain.config.messages import describe
from raytrain.config.sections import OptimConfig
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
    gpt_logits,
    gpt_parameters,
    gpt_recomputed,
    known_facts,
    language_flops,
)
from raytrain.plan.expert_hosts import kinds_of_hosts, number_of_hosts
from raytrain.plan.facts import ExpertFacts, HeldExperts, ModelFacts
from raytrain.plan.machines import is_named, peak_of
from raytrain.plan.memory import trained_bytes

# ---------------------------------------------------------------- sizes

LIFECYCLE_BUILDERS = ("experts.models:moe_gpt", "experts.models:moe_mlp")
"""Builders whose experts can come and go."""
KEPT = {"relu": 1, "gelu": 2, "swiglu": 4}
"""Hidden values of a row that autograd keeps, by activation: a ReLU keeps only its output."""


def check_section(experts: ExpertsConfig, *, default: int | None = None) -> int | None:
    """Check the keys of the section against each other. Returns the number of experts per layer: `default` if no key
    gives one, None if only the builder knows.

    Raises:
        InputError: top_k exceeds the number of experts, the widths are not one per expert, or keys of a shared expert
            are given without one.
    """
    number = experts.num_experts
    if isinstance(experts.hidden, list):
        number = len(experts.hidden) if number is None else number
        if len(experts.hidden) != number:
            expected = f"one per expert, and experts.num_experts is {number}"
            raise InputError("experts.hidden", got=f"{len(experts.hidden)} widths", expected=expected)
    number = default if number is None else number
    if number is not None and experts.top_k > number:
        most, remedy = f"at most experts.num_experts, {number}", "raise experts.num_experts or lower experts.top_k"
        raise InputError("experts.top_k", got=str(experts.top_k), expected=most, remedy=remedy)
    for key, value in (("shared_hidden", experts.shared_hidden), ("shared_gate", experts.shared_gate or None)):
        if value is not None and not experts.shared_expert:
            expected, remedy = "experts.shared_expert: true with it", "there is no shared expert"
            raise InputError(f"experts.{key}", got=str(value).lower(), expected=expected, remedy=remedy)
    _check_lifecycle(experts, number)
    return number


def _check_lifecycle(experts: ExpertsConfig, number: int | None) -> None:
    """Raises InputError for keys of `experts.lifecycle` that contradict each other or other keys."""
    cycle, key = experts.lifecycle, "experts.lifecycle"
    if not cycle.enabled:
        if experts.graph_routing:
            raise InputError(
                "experts.graph_routing", got=f"{experts.graph_routing:g} without {key}.max_experts", expected="0",
                remedy="the graph of experts is made by their lifecycle",
            )  # fmt: skip
        if cycle != type(cycle)():
            raise InputError(
                f"{key}.max_experts", got="null with other keys of experts.lifecycle", expected="a number with them",
                remedy="experts come and go only where their highest number is given",
            )  # fmt: skip
        return
    most, least, replay, merge = cycle.max_experts or 0, experts.least_living, cycle.replay, cycle.merge
    first, unkept = f"experts.num_experts, {number}", f"without {key}.replay.bytes"
    known, keeps = number is not None, replay.bytes is not None
    widths = experts.hidden if isinstance(experts.hidden, list) else []
    rows: list[tuple[bool, str, str, str, str]] = [
        (bool(widths), "experts.hidden", f"{len(widths)} widths with {key}.max_experts {most}",
         "one width, since a newcomer takes any free place", ""),
        (known and most < (number or 0), f"{key}.max_experts", str(most), f"at least {first}", ""),
        (least < experts.top_k, f"{key}.min_experts", str(least), f"at least experts.top_k, {experts.top_k}", ""),
        (known and least > (number or 0), f"{key}.min_experts", str(least), f"at most {first}", ""),
        (experts.graph_routing > 0 and not keeps, "experts.graph_routing", f"{experts.graph_routing:g} {unkept}", "0",
         "sleep cycles make the graph of experts, and they need the rows that are kept in that memory"),
        (not keeps and replay != type(replay)(), f"{key}.replay.bytes",
         "null with other keys of experts.lifecycle.replay", "a number with them",
         "rows are replayed only where there is memory for them"),
        (not keeps and merge.similarity not in (None, type(merge)().similarity), f"{key}.merge.similarity",
         f"{merge.similarity} {unkept}", "null, or a number for that too",
         "sleep cycles compare experts, on the rows that are kept"),
        (keeps and experts.hosts != 0, "experts.hosts", f"{experts.hosts} with {key}.replay.bytes {replay.bytes}", "0",
         "a sleep cycle runs in workers that hold all experts"),
        (experts.replicas > 0, "experts.replicas", f"{experts.replicas} with {key}.max_experts {most}", "0",
         "copies of experts that come and go are not made"),
    ]  # fmt: skip
    for wrong, where, got, expected, remedy in rows:
        if wrong:
            raise InputError(where, got=got, expected=expected, remedy=remedy)


def check_used(experts: ExpertsConfig, builder: str | None) -> None:
    """Refuse keys that ask for experts of a builder without any, or that move experts where they cannot.

    Raises:
        InputError: names the first of these keys.
    """
    if (builder or "").startswith("raytrain."):
        asked = {"num_experts": (experts.num_experts, "null"), "hosts": (experts.hosts, "auto or 0")}
        for key, (value, expected) in asked.items():
            if value not in (None, "auto", 0):
                raise InputError(
                    f"experts.{key}", got=f"{value if isinstance(value, int) else describe(value)} with {builder}",
                    expected=f"{expected}, as this model has no experts",
                    remedy="models with experts: experts.models:moe_gpt and experts.models:moe_mlp",
                )  # fmt: skip
    if experts.lifecycle.enabled and builder not in LIFECYCLE_BUILDERS:
        got, models = f"{experts.lifecycle.max_experts} with {builder or 'a module'}", " or ".join(LIFECYCLE_BUILDERS)
        raise InputError("experts.lifecycle.max_experts", got=got, expected=f"null, or a model of {models}")
    idle = {
        "replicas": (experts.replicas, "0", "copies of experts live on hosts"),
        "rebalance_every": (experts.rebalance_every, "null", "every worker holds all experts, so none can move"),
    }
    for key, (value, expected, remedy) in idle.items():
        if value and experts.hosts == 0:
            expected = f"{expected} where experts.hosts is 0"
            raise InputError(f"experts.{key}", got=describe(value), expected=expected, remedy=remedy)


def check_experts(experts: ExpertsConfig) -> int:
    """Return the number of experts per layer that a built-in model has room for. Raises InputError as
    `check_section`."""
    first = first_experts(experts)
    return experts.lifecycle.max_experts or first


def first_experts(experts: ExpertsConfig) -> int:
    """The number of experts per layer that a built-in model starts with. Raises InputError as `check_section`."""
    return check_section(experts, default=DEFAULT_EXPERTS) or DEFAULT_EXPERTS


def hidden_widths(experts: ExpertsConfig, width: int) -> tuple[int, ...]:
    """F of each expert of a layer; 4 x width by default."""
    if isinstance(experts.hidden, list):
        return tuple(experts.hidden)
    return (4 * width if experts.hidden is None else experts.hidden,) * check_experts(experts)


def shared_width(experts: ExpertsConfig, width: int) -> int:
    """F of the shared expert; that of the widest expert by default."""
    return experts.shared_hidden or max(hidden_widths(experts, width))


def check_moe_mlp(
    *, width: Any, layers: Any, num_features: Any, num_classes: Any, dropout: Any, experts: ExpertsConfig
) -> tuple[int, int]:
    """Check the keys of a `moe_mlp`; returns (features, classes). Raises SizeError and InputError."""
    if experts.capacity_factor is not None:
        expected = "null, since capacity is per sequence and moe_mlp has none"
        raise InputError("experts.capacity_factor", got=str(experts.capacity_factor), expected=expected)
    if num_features is None:
        raise SizeError("num_features", got="null", expected="a number, as this source does not provide it")
    classes = 1 if num_classes is None else num_classes
    check_counts(width=width, layers=layers, num_features=num_features, num_classes=classes)
    check_dropout(dropout)
    return num_features, classes


def layer_parameters(width: int, experts: ExpertsConfig) -> int:
    number = check_experts(experts) * width + sum(expert_sizes(width, experts))
    if experts.shared_expert:
        shapes = _shapes(width, shared_width(experts, width), experts).values()
        number += sum(map(prod, shapes)) + (width if experts.shared_gate else 0)
    return number


def expert_sizes(width: int, experts: ExpertsConfig) -> tuple[int, ...]:
    """Parameters of each expert of a layer."""
    shape = LayerShape(width, hidden_widths(experts, width), experts.activation, experts.bias)
    return tuple(map(shape.numel, range(shape.num_experts)))


def layer_products(width: int, experts: ExpertsConfig) -> float:
    """Multiplications of one token in one MoELayer, in the matrices of its experts and of the router.

    Experts of several sizes count as if each were chosen equally often.
    """
    number, widths = check_experts(experts), hidden_widths(experts, width)
    each = [_products(width, hidden, experts) for hidden in widths]
    total = number * width + experts.top_k * sum(each) / number
    if experts.shared_expert:
        total += _products(width, shared_width(experts, width), experts) + (width if experts.shared_gate else 0)
    return total


def _products(width: int, hidden: int, experts: ExpertsConfig) -> int:
    return sum(prod(shape) for shape in _shapes(width, hidden, experts).values() if len(shape) == 2)


def _shapes(width: int, hidden: int, experts: ExpertsConfig) -> dict[str, tuple[int, ...]]:
    return weight_shapes(width, hidden, activation=experts.activation, bias=experts.bias)


def layer_activations(width: int, experts: ExpertsConfig) -> float:
    """Numbers per token that autograd keeps for one MoELayer.

    For each choice: its row, its hidden values before and after the activation (for a ReLU only after it), its unsorted
    result, and its int64 places; for each expert its scores. The router's input is the norm's output, counted there.
    Experts of several sizes count as if each were chosen equally often.
    """
    number = check_experts(experts)
    kept = KEPT[experts.activation]
    hidden = sum(hidden_widths(experts, width)) / number
    routed = experts.top_k * (2 * width + kept * hidden + 12) + 3 * number
    if not experts.shared_expert:
        return routed
    gated = width + 1 if experts.shared_gate else 0  # its output, and the sigmoid it is multiplied with
    return routed + kept * shared_width(experts, width) + gated


def expert_part(layers: int, width: int, experts: ExpertsConfig, *, tokens: int) -> ExpertFacts:
    """Sizes of the experts, and of the rows sent to them; `tokens` of one sample."""
    number = check_experts(experts)
    hidden = sum(hidden_widths(experts, width)) / number
    return ExpertFacts(
        parameters=(expert_sizes(width, experts),) * layers,
        gate_bytes=layers * gate_bytes(width, number),
        rows_per_sample=experts.top_k * tokens,
        kept_bytes_per_row=round(FLOAT_BYTES * (width + KEPT[experts.activation] * hidden)),
        note=_lifecycle_note(experts),
        replay_bytes=experts.lifecycle.replay.bytes or 0,
    )


def _lifecycle_note(experts: ExpertsConfig) -> str:
    """For the plan: how many experts a layer has, and where newcomers go; empty where experts stay as they are."""
    if not experts.lifecycle.enabled:
        return ""
    number = first_experts(experts)
    fewest = "experts" if experts.placement == "fewest" else "rows for its speed"
    note = (
        f"{number} in each layer at the start, then {experts.least_living} to {experts.lifecycle.max_experts}, with "
        f"room from the start; on hosts, a newcomer goes to one with room and the fewest {fewest}"
    )
    if experts.lifecycle.replay.bytes is None:
        return note
    kept = size_text(experts.lifecycle.replay.bytes)
    return f"{note}; each worker keeps up to {kept} of rows in host memory, and in a sleep cycle a copy of its state"


def gate_bytes(width: int, number: int) -> int:
    """Bytes of one router: for each expert a row of weights, its bias and its share; and int64 counts."""
    return FLOAT_BYTES * number * (width + 2) + 8 * (number + 1)


def moe_gpt_flops(
    *, layers: int, width: int, context: int, vocab_size: int, experts: ExpertsConfig, window: int | None = None
) -> float:
    """FLOPs of forward and backward of one full context; only the experts that a token visits count."""
    sizes = {"layers": layers, "width": width, "context": context}
    others = gpt_parameters(**sizes, vocab_size=vocab_size, feed_forward=0) - context * width
    return language_flops(**sizes, matmul_parameters=others + layers * layer_products(width, experts), window=window)


def moe_mlp_flops(*, width: int, layers: int, features: int, classes: int, experts: ExpertsConfig) -> float:
    """FLOPs of forward and backward of one row."""
    return 6.0 * ((features + classes) * width + layers * layer_products(width, experts))


def _moe_gpt_facts(*, experts: ExpertsConfig, **keys: Any) -> ModelFacts:
    check_gpt(**keys)
    layers, width, context, vocab = (keys[k] for k in ("layers", "width", "context", "vocab_size"))
    sizes = {"layers": layers, "width": width, "context": context, "vocab_size": vocab}
    parameters = gpt_parameters(**sizes, feed_forward=layer_parameters(width, experts))
    feed_forward = layer_activations(width, experts)
    kept = {**sizes, "heads": keys["heads"], "dropout": keys["dropout"], "feed_forward": feed_forward}
    flops = moe_gpt_flops(**sizes, experts=experts, window=keys["window"])
    reason = f"formula of moe_gpt, {check_experts(experts)} experts per layer"
    return replace(
        facts(parameters, gpt_activations(**kept), flops, reason),
        experts=expert_part(layers, width, experts, tokens=context),
        recomputed_bytes_per_sample=gpt_recomputed(**kept),
        full_bytes_per_sample=gpt_logits(context=context, vocab_size=vocab),
    )


def _moe_mlp_facts(*, experts: ExpertsConfig, **keys: Any) -> ModelFacts:
    check_moe_mlp(**keys, experts=experts)
    layers, width, features = keys["layers"], keys["width"], keys["num_features"]
    classes = keys["num_classes"] or 1
    layer = layer_parameters(width, experts) + 2 * width
    parameters = (features + 1) * width + layers * layer + (width + 1) * classes
    kept = features + 2 * width + layers * (2 * width + layer_activations(width, experts)) + classes
    flops = moe_mlp_flops(width=width, layers=layers, features=features, classes=classes, experts=experts)
    reason = f"formula of moe_mlp, {check_experts(experts)} experts per layer"
    found = facts(parameters, round(FLOAT_BYTES * kept), flops, reason)
    return replace(found, experts=expert_part(layers, width, experts, tokens=1))


EXPERT_BUILDERS = {
    "experts.models:moe_gpt": BuilderKeys(
        ("layers", "heads", "width", "context", "vocab_size"), {"dropout": 0.0, "window": None}, _moe_gpt_facts
    ),
    "experts.models:moe_mlp": BuilderKeys(
        (), {"width": 128, "layers": 2, "num_features": None, "num_classes": None, "dropout": 0.0}, _moe_mlp_facts
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


# ---------------------------------------------------------------- bytes


def shared_out(
    facts: ExpertFacts, experts: ExpertsConfig, gpus: Sequence[Device] = (), *, dtype: str = "fp32"
) -> Callable[[int], list[HeldExperts]]:
    """Return a function: number of holders -> what each of them starts with.

    Args:
        gpus: of the machines, in the order of the workers; empty on CPUs. Holders on different kinds count at their
            data-sheet rates in `dtype` where these are known; in the run they measure themselves.
    """
    rules = PlacementRules.of(experts)
    costs = costs_of_sizes(facts.parameters)
    kinds = kinds_of_hosts(experts.hosts) if isinstance(experts.hosts, dict) else [gpu.name for gpu in gpus]

    def over(holders: int) -> list[HeldExperts]:
        specs = equal_hosts(holders)
        if len(kinds) == holders:
            rates = [peak_of(kind or "", dtype) for kind in kinds]
            if all(rates):
                specs = [replace(spec, speed=rate or 1.0) for spec, rate in zip(specs, rates, strict=True)]
        placement = place_first(rules, costs, specs)
        homes, replicas, number = [0] * holders, [0] * holders, [0] * holders
        for layer, sizes in zip(placement.layers, facts.parameters, strict=True):
            for hosts, size in zip(layer.copies, sizes, strict=True):
                homes[hosts[0]] += size
                for host in hosts:
                    number[host] += 1
                for host in hosts[1:]:
                    replicas[host] += size
        return [HeldExperts(*row) for row in zip(number, homes, replicas, strict=True)]

    return over


def check_room(facts: ExpertFacts, experts: ExpertsConfig, devices: Iterable[Device], *, hosts: int) -> None:
    """Check before the start whether the experts fit the GPUs of the hosts: those of the types that `experts.hosts`
    names, else the largest ones.

    Raises:
        InputError: they do not fit; names an expert that is too large for any GPU.
    """
    largest = sorted(devices, key=lambda gpu: -gpu.memory_bytes)
    if isinstance(experts.hosts, dict):
        left, largest = largest, []
        for kind, number in experts.hosts.items():  # two names may mean the same GPUs
            taken = [gpu for gpu in left if is_named(gpu, kind)][:number]
            largest += taken
            left = [gpu for gpu in left if not any(gpu is one for one in taken)]
    largest = largest[:hosts]
    if len(largest) < hosts or not all(gpu.memory_bytes for gpu in largest):  # not always known to Ray
        return
    rules = PlacementRules.of(experts)
    specs = [
        HostSpec(host, 1.0, int(MEMORY_SHARE * gpu.memory_bytes), device=gpu.name) for host, gpu in enumerate(largest)
    ]
    place_first(rules, costs_of_sizes(facts.parameters), specs)


def idle_keys(experts: ExpertsConfig, facts: ExpertFacts | None, *, place: Any, workers: int) -> list[str]:
    """Keys of the section that have no effect, or less than they ask for, where the experts live; one sentence each.

    Args:
        facts: None if the model's sizes are unknown.
        place: from the plan: "none", 0, "colocated", a number of hosts, or numbers by accelerator type.
    """
    if place == "none":
        return []
    holders = workers if place == "colocated" else number_of_hosts(place)
    title = "worker" if place in (0, "colocated") else "host"
    why = ""
    if holders < 2:
        why = f"{'every' if place == 0 else 'the one'} {title} holds all experts"
    elif experts.placement == "round_robin":
        why = "experts.placement round_robin neither looks at loads nor makes copies"
    if why:
        asked = {"rebalance_every": experts.rebalance_every, "replicas": experts.replicas}
        return [f"experts.{key} {value} changes nothing: {why}" for key, value in asked.items() if value]
    numbers = [len(layer) for layer in facts.parameters] if facts else [experts.num_experts or 0]
    most = min(numbers, default=0) * (holders - 1)
    if not 0 < most < experts.replicas:
        return []
    return [
        f"experts.replicas {experts.replicas} is more than {holders} {title}s can hold: there is room for {most} in a"
        f" layer, one of each expert on every other {title}"
    ]


def expert_costs(shapes: Sequence[LayerShape], optim: OptimConfig, *, dtype: str) -> Costs:
    """Bytes and work of each expert under this optimizer. A replica has weights and gradients; a move sends weights and
    optimizer state."""

    def cost(parameters: int) -> ExpertCost:
        used = trained_bytes(parameters, optim, dtype=dtype)
        replica, moved = used.weights + used.gradients, used.weights + used.optimizer
        return ExpertCost(used.kept, replica, row_work(parameters), moved)

    return [[cost(shape.numel(expert)) for expert in range(shape.num_experts)] for shape in shapes]
