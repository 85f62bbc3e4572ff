"""What is known of a model and its data before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ExpertFacts:
    """The experts of a model, which may be placed outside the workers.

    Attributes:
        parameters: number of parameters of each expert of each layer.
        gate_bytes: size of the routers of all layers, which every worker holds; linear in the number of experts.
        rows_per_sample: rows that one sample sends through the experts of one layer.
        row_bytes: bytes transferred for one row, one way, in fp32.
        kept_bytes_per_row: bytes that the process with the expert keeps of a row for backward, in fp32.
    """

    parameters: tuple[tuple[int, ...], ...]
    gate_bytes: int
    rows_per_sample: int
    row_bytes: int
    kept_bytes_per_row: int

    @property
    def total(self) -> int:
        """Parameters of all experts."""
        return sum(map(sum, self.parameters))

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward of one sample through its experts, assuming an even load."""
        return sum(6.0 * self.rows_per_sample * sum(layer) / len(layer) for layer in self.parameters)


@dataclass(frozen=True)
class HeldExperts:
    """The experts that one process holds at the start: their number, and the parameters of homes and of replicas."""

    number: int
    homes: int
    replicas: int


HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class PassFacts:
    """What one forward and backward costs besides its products.

    Attributes:
        full_bytes: tensors that exist at its peak for each row, in fp32; weights, gradients and the batch do not count.
        half_bytes: the same where products are in half precision.
        recomputed_bytes, half_recomputed_bytes: the same with blocks recomputed in backward; None where unknown.
        moved_bytes: bytes that the operations other than products read and write for each row, in fp32.
        operations: number of operations of one micro-batch, whatever its rows.
        width: width of a typical product, on which its rate depends.
        fixed_bytes: tensors that exist at the peak whatever the rows, in fp32, such as the gradient being computed.
        eval_bytes, half_eval_bytes: the same as `full_bytes` and `half_bytes` of a forward without gradients.
    """

    full_bytes: int
    half_bytes: int
    recomputed_bytes: int | None
    half_recomputed_bytes: int | None
    moved_bytes: float
    operations: int
    width: int
    fixed_bytes: int = 0
    eval_bytes: int = 0
    half_eval_bytes: int = 0

    def row_bytes(self, dtype: str, *, recomputed: bool) -> int:
        """Peak bytes of a row in a number format; those of kept activations where recomputation is unknown."""
        full, half = self.full_bytes, self.half_bytes
        if recomputed:
            full = full if self.recomputed_bytes is None else self.recomputed_bytes
            half = half if self.half_recomputed_bytes is None else self.half_recomputed_bytes
        return half if dtype in HALF else 2 * full if dtype == "fp64" else full

    def scored_bytes(self, dtype: str) -> int:
        """Peak bytes of a row that is evaluated, in a number format."""
        return self.half_eval_bytes if dtype in HALF else (2 if dtype == "fp64" else 1) * self.eval_bytes


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model without building it on a device.

    Bytes count the master weights (fp32: 4 bytes per parameter). `activation_bytes_per_sample`, `flops_per_sample`
    (forward and backward of one row) and `blocks` (parameters of each repeated block) are None where unknown.
    """

    parameters: int
    trainable_bytes: int
    activation_bytes_per_sample: int | None
    flops_per_sample: float | None
    reason: str
    experts: ExpertFacts | None = None
    blocks: tuple[int, ...] | None = None
    passes: PassFacts | None = None

    def row_bytes(self, dtype: str, *, recomputed: bool) -> int | None:
        """Peak bytes that a row adds to a worker's memory; None where unknown."""
        if self.passes is not None:
            return self.passes.row_bytes(dtype, recomputed=recomputed)
        known = self.activation_bytes_per_sample
        return known if known is None or dtype != "fp64" else 2 * known

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "blocks": None if self.blocks is None else list(self.blocks)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ModelFacts:
        """The inverse of `to_json`, also after JSON made lists of tuples."""
        experts = row.get("experts")
        if experts is not None:
            parameters = tuple(tuple(layer) for layer in experts["parameters"])
            experts = ExpertFacts(**{**experts, "parameters": parameters})
        blocks, passes = row.get("blocks"), row.get("passes")
        known = {"blocks": None if blocks is None else tuple(blocks), "passes": passes and PassFacts(**passes)}
        return cls(**{**row, "experts": experts, **known})


@dataclass(frozen=True)
class DataFacts:
    """What is known of a source without reading all of it: rows, bytes, and tokens per row where it has tokens.

    `kind` says how its rows are read: "memory" (all are in host memory), "items" (one by one from a map-style dataset)
    or "groups" (from files, one row group at a time).

    `varies`: items differ from one reading to the next, as with random transforms. `item_s`: seconds to read an item;
    None if that was not measured.
    """

    train_rows: int
    eval_rows: int
    row_bytes: int
    tokens_per_row: int | None
    total_bytes: int
    vocab_size: int | None
    reason: str
    kind: str = "memory"
    varies: bool = False
    item_s: float | None = None

    @classmethod
    def of_rows(
        cls, rows: int, evaluation: int | None, *, fraction: float, row_bytes: int, reason: Callable[[int, int], str],
        kind: str = "memory",
    ) -> DataFacts:  # fmt: skip
        """Of rows without tokens.

        Args:
            rows: of the training data.
            evaluation: rows of the evaluation data; None if `fraction` of the training rows is held out.
            reason: gets the rows to train on and those for evaluation.
        """
        held = int(rows * fraction) if evaluation is None else evaluation
        train = rows - held if evaluation is None else rows
        total = (train + held) * row_bytes
        return cls(
            train, held, row_bytes, None, total_bytes=total, vocab_size=None, reason=reason(train, held), kind=kind
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
