"""`data.collate`: batches made by the user's own function, from a list of rows to a dict of tensors.

The function receives the rows of one micro-batch on the CPU: the items of a map-style dataset as the dataset returns
them, otherwise a dict of tensors for each row, not padded. It returns a dict of tensors, which is moved to the device;
containers of tensors, strings and None may be values too. It is called again for every micro-batch of every epoch, in
the process that reads the rows, with Python's, numpy's and torch's generators seeded by (seed, epoch, first row). A
mean loss is weighted by the labels other than -100 in the returned batch; without integer labels, by its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raytrain.data.rows.contract import Batch, Split, SplitView
from raytrain.data.rows.ragged import MASK
from raytrain.data.rows.residency import StreamSplit
from raytrain.data.transfer import tensors_of
from raytrain.errors import InputError


@dataclass(frozen=True)
class UsersCollate:
    """The function of `data.collate`.

    Attributes:
        function: from a list of rows to a batch.
        name: for messages.
    """

    function: Callable[[list[Any]], Any]
    name: str

    def __call__(self, rows: list[Any]) -> Batch:
        """Collate rows.

        Raises:
            InputError: the function returned something other than a dict of tensors on the CPU.
        """
        batch = self.function(rows)
        if not isinstance(batch, Mapping) or not all(isinstance(name, str) for name in batch):
            names = f" with the keys {list(batch)}" if isinstance(batch, Mapping) else ""
            raise self._refused(f"a {type(batch).__name__}{names}")
        tensors = list(tensors_of(batch, ""))
        if not tensors:
            raise self._refused(f"the keys {', '.join(batch) or 'none'} without a tensor")
        for path, tensor in tensors:
            if tensor.device.type != "cpu":
                raise self._refused(f"{path} on {tensor.device}")
        return dict(batch)

    def _refused(self, seen: str) -> InputError:
        return InputError(
            "data.collate",
            got=f"{self.name} returned {seen}",
            expected="a dict of tensors on the CPU, with string keys",
        )


class CollatedSplit(SplitView):
    """Rows in memory that the user's function collates.

    Args:
        split: the rows, on the host.
        key: what an error names.
    """

    def __init__(self, split: Split, collate: UsersCollate, *, key: str) -> None:
        super().__init__(split)
        self.collate: UsersCollate | None = collate
        self.key = key
        self._function = collate

    def read(self, indices: np.ndarray, *, before: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
        """Each row as a dict of tensors, not padded and without a mask; no code of the user's runs."""
        adds_mask = getattr(self.split, "adds_mask", False)
        rows = (self.split.gather(indices[at : at + 1]) for at in range(len(indices)))
        return [{name: value[0] for name, value in row.items() if not (adds_mask and name == MASK)} for row in rows]

    def batch(self, rows: list[Any]) -> Batch:
        """These rows as one batch."""
        return self._function(rows)

    def gather(self, indices: np.ndarray) -> Batch:
        return self.batch(self.read(indices))

    def weights(self, indices: np.ndarray) -> None:
        """Not known without calling the function, which may change the labels."""

    def to(self, device: torch.device | str, *, rows: int | None = None) -> StreamSplit:
        """Rows stay on the host; each batch is moved."""
        return StreamSplit(self, device=device)
