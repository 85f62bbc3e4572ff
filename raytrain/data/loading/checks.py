"""Checks of tensors: that each is on its device, and that no model writes into rows that are lent to it as views."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.data.rows.contract import Batch, Split
from raytrain.data.rows.splits import TensorSplit
from raytrain.data.transfer import is_on, tensors_of
from raytrain.errors import DevicePlacementError, RunError

NAMED_AT_MOST = 5


def find_misplaced(value: Any, device: torch.device | str, *, name: str = "batch") -> list[str]:
    """Paths of all tensors in a batch, a module or its state that are not on `device`; no device is read.

    Args:
        value: nested containers of tensors, or a module.
        device: where they should be.
        name: what the path begins with; "" for a module's own names.
    """
    wanted = torch.device(device)
    return [path for path, tensor in tensors_of(value, name) if not is_on(tensor, wanted)]


def verify_placement(value: Any, device: torch.device | str, *, name: str = "batch") -> None:
    """Raises DevicePlacementError naming the tensors of `value` that are elsewhere, and where they are."""
    paths = find_misplaced(value, device, name=name)
    if not paths:
        return
    where = dict(tensors_of(value, name))
    named = ", ".join(f"{path} is on {where[path].device}" for path in paths[:NAMED_AT_MOST])
    more = f" and {len(paths) - NAMED_AT_MOST} more" if len(paths) > NAMED_AT_MOST else ""
    raise DevicePlacementError(f"{named}{more}, expected every tensor on {torch.device(device)}")


@dataclass
class InputWriteGuard:
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
            split.returns_views = not written
            self._versions = _versions(split)
            return written
        if self._settled and split.returns_views and _versions(split) != self._versions:
            raise RunError(
                f"the model wrote into its input after it had not done so at first: {self.name} rows kept on the "
                "device are damaged; data.storage: stream gives it a copy each time"
            )
        return []


def _versions(split: TensorSplit) -> list[int]:
    return [column._version for column in split.columns.values() if isinstance(column, Tensor)]


class DeviceGuard:
    """Where every parameter and buffer of a module should be; looked at in each step, without a device read.

    The places are listed once (the module's own tables, so that a tensor put in place of another is seen too);
    a look costs a tenth of a microsecond a tensor.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with its index
        self._slots = [
            (table, leaf, f"{path}.{leaf}" if path else leaf)
            for path, part in module.named_modules()
            for table in (part._parameters, part._buffers)
            for leaf, tensor in table.items()
            if tensor is not None
        ]

    def check(self) -> None:
        """Raises DevicePlacementError naming the first tensor that is elsewhere."""
        for table, leaf, name in self._slots:
            tensor = table.get(leaf)
            if tensor is not None and tensor.device != self._device:
                raise DevicePlacementError(
                    f"{name} is on {tensor.device}, expected every tensor on {self._device}; "
                    "something moved it during training"
                )

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Checks after the work inside; if that fails, a misplaced tensor is the better explanation."""
        try:
            yield
        except RuntimeError as error:
            try:
                self.check()
            except DevicePlacementError as cause:
                raise cause from error
            raise
        self.check()
