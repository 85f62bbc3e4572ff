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

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "blocks": None if self.blocks is None else list(self.blocks)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ModelFacts:
        """The inverse of `to_json`, also after JSON made lists of tuples."""
        experts = row.get("experts")
        if experts is not None:
            parameters = tuple(tuple(layer) for layer in experts["parameters"])
            experts = ExpertFacts(**{**experts, "parameters": parameters})
        blocks = row.get("blocks")
        return cls(**{**row, "experts": experts, "blocks": None if blocks is None else tuple(blocks)})


@dataclass(frozen=True)
class DataFacts:
    """What is known of a source without reading all of it: rows, bytes, and tokens per row where it has tokens.

    `kind` says how its rows are read: "memory" (all are in host memory), "items" (one by one from a map-style dataset)
    or "groups" (from files, one row group at a time).
    """

    train_rows: int
    eval_rows: int
    row_bytes: int
    tokens_per_row: int | None
    total_bytes: int
    vocab_size: int | None
    reason: str
    kind: str = "memory"

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
