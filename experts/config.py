"""The `experts` section (how many, routing, where they live, how they come and go), and the shapes of their weights.

Torch-free; the base of this package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from cluster.config import Count, NonNegative, NonNegativeInt, Positive, Section, Share, Text
from raytrain.config.decode import JsonRecord

# ---------------------------------------------------------------- shapes

Activation = Literal["gelu", "swiglu", "relu"]

Key = tuple[int, int]
"""(layer, logical expert)."""


def weight_shapes(
    width: int, hidden: int, *, activation: Activation | str, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of one expert by name, in the order in which they are packed.

    w1 (F, D) is the input projection, w2 (D, F) the output projection; swiglu multiplies by a third one, w3 (F, D).
    With `bias` each adds a vector: b1 (F,), b2 (D,), b3 (F,).
    """
    shapes: dict[str, tuple[int, ...]] = {"w1": (hidden, width), "w2": (width, hidden)}
    if activation == "swiglu":
        shapes["w3"] = (hidden, width)
    if bias:
        shapes |= {f"b{name[1]}": shape[:1] for name, shape in list(shapes.items())}
    return shapes


@dataclass(frozen=True)
class LayerShape(JsonRecord):
    """Sizes and kind of the experts of one layer.

    Attributes:
        hidden_E: the hidden width of each.
        frozen_E: the weights of each that are not trained, by name; empty if all are.
        name: of the layer in the model, for messages.
    """

    width: int
    hidden_E: tuple[int, ...]
    activation: Activation
    bias: bool = False
    frozen_E: tuple[tuple[str, ...], ...] = ()
    name: str = ""

    @property
    def num_experts(self) -> int:
        return len(self.hidden_E)

    @property
    def kind(self) -> dict[str, Any]:
        """Keyword arguments of `build_experts` that all experts share."""
        return {"activation": self.activation, "bias": self.bias}

    def weights(self, expert: int) -> dict[str, tuple[int, ...]]:
        """`weight_shapes` of one expert."""
        return weight_shapes(self.width, self.hidden_E[expert], **self.kind)

    def trained(self, expert: int) -> dict[str, tuple[int, ...]]:
        """`weights` without the frozen ones."""
        frozen = self.frozen_E[expert] if self.frozen_E else ()
        return {name: shape for name, shape in self.weights(expert).items() if name not in frozen}

    def numel(self, expert: int) -> int:
        """Number of parameters of one expert."""
        return sum(math.prod(shape) for shape in self.weights(expert).values())


def row_work(parameters: int) -> float:
    """FLOPs of one row of an expert with this number of parameters, forward and backward."""
    return 6.0 * parameters


# ---------------------------------------------------------------- config

DEFAULT_EXPERTS = 4
"""Experts of a layer of a built-in model where `num_experts` is null."""

HostsByAccelerator = Annotated[
    dict[Text, Count], Field(min_length=1, json_schema_extra={"expected": "a mapping such as {A100: 4, T4: 8}"})
]
"""Accelerator type -> how many hosts of it, such as {A100: 4, T4: 8}."""


HiddenWidths = Annotated[list[Count], Field(min_length=1)]
"""The hidden width of each expert of a layer, in order."""

OneOrTwo = Annotated[int, Field(ge=1, le=2, json_schema_extra={"expected": "1, 2"})]
"""Not Literal[1, 2], which accepts `true` as 1."""


class BirthConfig(Section):
    """When a layer gets another expert: a copy of its most active one, with a little noise."""

    uncertainty: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.7,
        description="entropy of the router over that of an even choice from which an expert is born, once the router "
        "has learnt; 0: whenever there is room",
    )
    cooldown_steps: Count = Field(default=100, description="fewest steps between two births in a layer")


class MergeConfig(Section):
    """When two experts of a layer become one."""

    similarity: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=0.95, description="cosine of their outputs on replayed rows from which two experts merge; null: never"
    )


class PruneConfig(Section):
    """When an expert goes without an heir."""

    idle_steps: Count | None = Field(
        default=1000, description="steps for which an expert must have been dormant; null: never"
    )
    least_share: Share = Field(
        default=0.001, description="share of the rows of its layer below which an expert is dormant"
    )


class ReplayConfig(Section):
    """What is kept of the rows that the model was trained on, and the sleep cycles that replay them."""

    bytes: Count | None = Field(
        default=None,
        examples=[16777216],
        description="most bytes of host memory for the kept rows, a sample of every fourth step's first ones; null "
        "keeps none, and there is no sleep",
    )
    every: Count = Field(default=1000, description="steps between two sleep cycles")
    rows: Count = Field(default=512, description="rows that a cycle replays")
    batch_size: Count = Field(default=32, description="rows of a replayed batch")
    lr: Positive = Field(default=1e-4, description="learning rate of the replay")
    priority: Literal["uncertainty", "uniform"] = Field(
        default="uncertainty",
        description="which kept rows are replayed more often; a row counts as fully uncertain until its first replay",
    )
    targets: Literal["labels", "teacher"] = Field(
        default="labels", description="what replayed rows are trained towards: their labels or the model's logits then"
    )


class LifecycleConfig(Section):
    """Experts that are born, merge and are pruned while the model trains; off without `max_experts`.

    Every layer has room for `max_experts` from the first step on: num_experts of its slots are in use at the start.
    """

    min_experts: Count | None = Field(
        default=None, examples=[2], description="fewest living experts of a layer; null: top_k"
    )
    max_experts: Count | None = Field(
        default=None,
        examples=[8],
        description="most living experts of a layer, for which there is room from the start; null: experts stay as "
        "they are",
    )
    every: Count = Field(default=50, description="steps between two decisions")
    birth: BirthConfig = BirthConfig()
    merge: MergeConfig = MergeConfig()
    prune: PruneConfig = PruneConfig()
    replay: ReplayConfig = ReplayConfig()

    @property
    def enabled(self) -> bool:
        return self.max_experts is not None


class ExpertsConfig(Section):
    """Read by the mixture-of-experts builders and by the expert hosts; a dense model ignores it."""

    _connection: Any = PrivateAttr(default=None)

    num_experts: Count | None = Field(
        default=None, examples=[8], description="experts per layer; null lets the builder choose"
    )
    top_k: Count = Field(default=2, description="experts each token is sent to")
    hosts: NonNegativeInt | Literal["auto", "colocated"] | HostsByAccelerator = Field(
        default="auto", description="actors that own the experts; 0 keeps them inside every worker"
    )
    inflight: OneOrTwo | Literal["auto"] = Field(default="auto", description="micro-batches in flight to the experts")
    capacity_factor: Positive | None = Field(
        default=None,
        examples=[1.25],
        description="tokens of a row that an expert may take, as a multiple of the mean; null drops none",
    )
    score: Literal["softmax", "sigmoid"] = Field(default="softmax", description="how the router scores experts")
    renormalize: bool = Field(default=True, description="weights of the chosen experts sum to one")
    balance: Literal["bias", "loss", "both", "none"] = Field(
        default="both", description="what balances the load of the experts"
    )
    balance_weight: NonNegative = Field(default=0.01, description="weight of the per-sequence balance loss")
    z_loss_weight: NonNegative = Field(default=0.001, description="weight of the router's z-loss")
    bias_rate: NonNegative = Field(default=0.001, description="step of the loss-free bias at each commit")
    noise: NonNegative = Field(default=0.0, description="standard deviation of the noise on router logits in training")
    temperature: Positive = Field(default=1.0, description="divides the router logits, in training and afterwards")
    shared_expert: bool = Field(default=False, description="adds an expert that every token visits")
    shared_hidden: Count | None = Field(
        default=None, examples=[256], description="hidden width of the shared expert; null is that of the widest expert"
    )
    shared_gate: bool = Field(default=False, description="weights the shared expert by its own sigmoid gate")
    hidden: Count | HiddenWidths | None = Field(
        default=None,
        examples=[256],
        description="hidden width of an expert, or a list with that of each; null lets the builder choose",
    )
    activation: Activation = Field(default="gelu", description="nonlinearity inside an expert")
    bias: bool = Field(default=False, description="linear maps of an expert add a bias; with relu this is an MLP")
    replicas: NonNegativeInt = Field(default=0, description="extra copies of the busiest experts of each layer")
    placement: Literal["auto", "lpt", "eplb", "round_robin", "fewest"] = Field(
        default="auto",
        description="which host owns which experts; fewest: as auto, and newcomers go to the host with the fewest",
    )
    trace_every: Count | None = Field(
        default=None, examples=[100], description="steps between records of the experts of each token; null keeps none"
    )
    rebalance_every: Count | None = Field(
        default=None,
        examples=[200],
        description="steps between decisions to move experts; null keeps the first placement",
    )
    graph_routing: NonNegative = Field(
        default=0.0,
        examples=[0.5],
        description="weight of the graph of experts in routing: experts linked to likely ones become likelier",
    )
    lifecycle: LifecycleConfig = LifecycleConfig()

    @property
    def least_living(self) -> int:
        return self.lifecycle.min_experts or self.top_k

    @property
    def connection(self) -> Any:
        """How a worker reaches the expert hosts (`experts.exchange.membership.Connection`); None keeps the experts in
        the worker."""
        return self._connection

    def connected(self, connection: Any) -> ExpertsConfig:
        """Return a copy of this section with a connection, which is not a key of the YAML."""
        section = self.model_copy()
        section._connection = connection
        return section
