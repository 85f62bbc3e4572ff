"""Where batches live: all rows on the device, some of them, or none, and each batch moved to it."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from raytrain.data.loading.transfer import pin, to_device
from raytrain.data.rows.contract import Batch, Order, Split

Storage = Literal["resident", "partial", "pinned", "stream"]


class StreamSplit:
    """A split gathered on the CPU, each batch then moved to the device.

    Args:
        pinned: batches go through pinned memory, so that nobody waits for the copy.
    """

    def __init__(self, split: Split, *, device: torch.device | str, pinned: bool = False) -> None:
        self.split = split
        self.device = torch.device(device)
        self.pinned = pinned
        self.tokens_per_row = split.tokens_per_row

    def __len__(self) -> int:
        return len(self.split)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.split.nbytes

    def order(self, seed: int, epoch: int) -> Order:
        return self.split.order(seed, epoch)

    def eval_order(self) -> np.ndarray:
        return self.split.eval_order()

    def gather(self, indices: np.ndarray) -> Batch:
        return self.moved(self.split.gather(indices))

    def moved(self, host: Batch) -> Batch:
        """A batch of the host on the device."""
        return to_device(pin(host) if self.pinned else host, self.device)

    def weights(self, indices: np.ndarray) -> int | None:
        return self.split.weights(indices)

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        return self.split.lengths(indices)

    def to(self, device: torch.device | str) -> StreamSplit:
        """The same host data, streamed to another device."""
        return StreamSplit(self.split, device=device, pinned=self.pinned)

    def partly(self, device: torch.device | str, *, rows: int) -> Split:
        """The same host data, some of it kept on a device."""
        return self.split.partly(device, rows=rows)


def place(split: Split, storage: Storage, device: torch.device | str, *, resident_rows: int = 0) -> Split:
    """The split as training reads it; order and batches are the same for any storage.

    Args:
        split: as the source opened it, on the host.
        storage: "resident" puts all of it on the device once, "partial" its first `resident_rows`; "stream" moves
            each batch, "pinned" does so through pinned memory.
        device: where batches must be.
    Raises:
        ValueError: a storage that the plan has not resolved to one of these.
    """
    if storage == "resident":
        return split.to(device)
    if storage == "partial":
        return split.partly(device, rows=resident_rows)
    if storage in ("stream", "pinned"):
        host = split.split if isinstance(split, StreamSplit) else split
        pinned = storage == "pinned" and torch.device(device).type != "cpu"
        return StreamSplit(host, device=device, pinned=pinned)
    raise ValueError(f"storage is {storage!r}, expected 'resident', 'partial', 'pinned' or 'stream'")
