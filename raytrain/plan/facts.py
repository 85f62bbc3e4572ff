"""What is known of a model and its data before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raytrain.config.decode import JsonRecord


@dataclass(frozen=True)
class ExpertFacts:
    """The experts of a model, which may be placed outside the workers."""

    parameters: tuple[tuple[int, ...], ...]  # of each expert of each layer
    gate_bytes: int  # of the routers of all layers, which every worker holds; linear in the number of experts
    rows_per_sample: int  # rows that one sample sends through the experts of one layer
    kept_bytes_per_row: int  # that the process with the expert keeps of a row for backward, in fp32
    note: str = ""  # what else the plan says about them
    replay_bytes: int = 0  # of the rows that each worker keeps for sleep cycles, in host memory

    @property
    def total(self) -> int:
        return sum(map(sum, self.parameters))


@dataclass(frozen=True)
class HeldExperts:
    """The experts that one process holds at the start: their number, and the parameters of homes and of replicas."""

    number: int
    homes: int
    replicas: int


HALF_OF_FULL = 5 / 8
"""Activations in half precision over those in fp32: residuals and norms stay in fp32 (a GPT measured 0.64)."""


@dataclass(frozen=True)
class ModelFacts(JsonRecord):
    """What is known of a model without building it on a device; None where unknown.

    Bytes count the master weights (fp32: 4 bytes per parameter).
    """

    parameters: int
    trainable_bytes: int
    activation_bytes_per_sample: int | None  # what backward needs of one row in fp32
    flops_per_sample: float | None  # forward and backward of one row
    reason: str
    experts: ExpertFacts | None = None
    blocks: tuple[int, ...] | None = None  # parameters of each repeated block
    recomputed_bytes_per_sample: int | None = None  # the activations with blocks recomputed in backward
    # of both, what a half precision does not halve: the logits, their cross-entropy in fp32 and its gradient
    full_bytes_per_sample: int = 0

    def row_bytes(self, dtype: str, *, recomputed: bool) -> int | None:
        """Bytes that a row adds to a worker's memory; None where unknown."""
        known = self.recomputed_bytes_per_sample if recomputed else self.activation_bytes_per_sample
        if known is None:
            return None
        full = self.full_bytes_per_sample if dtype in ("bf16", "fp16") else 0
        return full + scaled_bytes(known - full, dtype)


def scaled_bytes(size: int, dtype: str) -> int:
    """Activations in a number format, from their bytes in fp32."""
    if dtype in ("bf16", "fp16"):
        return int(HALF_OF_FULL * size)
    return 2 * size if dtype == "fp64" else size


@dataclass(frozen=True)
class DataFacts(JsonRecord):
    """What is known of a source without reading all of it: rows, bytes, and tokens per row where it has tokens."""

    train_rows: int
    eval_rows: int
    row_bytes: int
    tokens_per_row: int | None
    total_bytes: int
    vocab_size: int | None
    reason: str
    kind: str = "memory"  # all are in memory; "items": read one by one from a map-style dataset, "groups": row groups
    varies: bool = False  # items differ from one reading to the next, as with random transforms
    item_s: float | None = None  # seconds to read an item, if measured

    @classmethod
    def of_rows(
        cls, rows: int, evaluation: int | None, *, fraction: float, row_bytes: int, reason: Callable[[int, int], str],
        kind: str = "memory",
    ) -> DataFacts:  # fmt: skip
        """Of rows without tokens: `rows` of the training data and `evaluation` rows, None if `fraction` of the training
        rows is held out. `reason` gets the rows to train on and those for evaluation."""
        held = int(rows * fraction) if evaluation is None else evaluation
        train = rows - held if evaluation is None else rows
        total = (train + held) * row_bytes
        return cls(train, held, row_bytes, None, total, None, reason(train, held), kind)
