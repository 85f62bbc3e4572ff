"""Rows that are lent as views must not be written to: a model that does so is found at its first batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from raytrain.data.loading.misplaced import tensors_of
from raytrain.data.rows.contract import Batch, Split
from raytrain.data.rows.splits import TensorSplit
from raytrain.errors import RunError


@dataclass
class Guard:
    """Watches one split that is on the device.

    The first batch is a copy. Where nobody wrote to it, batches of neighbouring rows are views from then on, and no
    longer copied; where somebody did, all batches stay copies. torch counts writes to a tensor and its views in
    `_version`; no device is read.
    """

    split: Split
    name: str
    _first: list[tuple[str, Tensor, int]] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _settled: bool = False

    def given(self, batch: Batch) -> None:
        """A batch goes to the model; the first one is kept until the next look."""
        if not self._settled and not self._first and isinstance(self.split, TensorSplit):
            self._first = [(path, tensor, tensor._version) for path, tensor in tensors_of(batch, "batch")]

    def look(self) -> list[str]:
        """Between two passes over the batches: tensors of the first one that were written to, once; else nothing.

        Raises:
            RunError: rows that were lent are damaged, by a model that had left its first batch alone.
        """
        split = self.split
        if not isinstance(split, TensorSplit):
            return []
        if self._first:
            written = [path for path, tensor, version in self._first if tensor._version != version]
            self._first, self._settled = [], True
            split.lends = not written
            self._versions = _versions(split)
            return written
        if self._settled and split.lends and _versions(split) != self._versions:
            raise RunError(
                f"the model wrote into its input after it had not done so at first: {self.name} rows kept on the "
                "device are damaged; data.storage: stream gives it a copy each time"
            )
        return []


def _versions(split: TensorSplit) -> list[int]:
    return [column._version for column in split.columns.values() if isinstance(column, Tensor)]
