"""Checks of tensors: that each is on its device, and that no model writes into rows that are lent to it as views."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.config.messages import abbreviated
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
    """Raise DevicePlacementError naming the tensors of `value` that are on another device, and which."""
    paths = find_misplaced(value, device, name=name)
    if not paths:
        return
    where = dict(tensors_of(value, name))
    named = abbreviated([f"{path} is on {where[path].device}" for path in paths], NAMED_AT_MOST)
    owner = f"; it is of {owner_of(value, paths[0])}" if isinstance(value, nn.Module) else ""
    raise DevicePlacementError(f"{named}, expected every tensor on {torch.device(device)}{owner}")


def owner_of(module: nn.Module, name: str) -> str:
    """Whose tensor `name` of a module is: the nearest class around it that is not torch's own, and the line at which
    that class begins."""
    path = name.split(".")[:-1]
    around = [module.get_submodule(".".join(path[:length])) for length in range(len(path), -1, -1)]
    own = next((part for part in around if not type(part).__module__.startswith("torch.")), around[0])
    kind = type(own)
    try:
        line = f" ({os.path.basename(inspect.getsourcefile(kind) or '?')}:{inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):  # made in a notebook cell that is gone, or by a program
        line = ""
    return f"{kind.__name__}{line}"


@dataclass
class InputWriteGuard:
    """Detect a model that writes into its input batches, for one split that is kept on the device.

    The first batch is a copy. If the model did not write to it, later batches of neighbouring rows are views and are
    not copied; if it did, all batches stay copies. torch counts writes to a tensor and its views in `_version`, so
    that nothing is read from the device.
    """

    split: Split
    name: str
    _first: list[tuple[str, Tensor, int]] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _checked: bool = False

    def given(self, batch: Batch) -> None:
        """Remember the first batch that goes to the model, until the next `look`."""
        if not self._checked and not self._first and isinstance(self.split, TensorSplit):
            self._first = [(path, tensor, tensor._version) for path, tensor in tensors_of(batch, "batch")]

    def look(self) -> list[str]:
        """Between two passes over the batches: the tensors of the first batch that the model wrote to, reported once.

        Raises:
            RunError: the model has overwritten kept rows, after it had not written to its first batch.
        """
        split = self.split
        if not isinstance(split, TensorSplit):
            return []
        if self._first:
            written = [path for path, tensor, version in self._first if tensor._version != version]
            self._first, self._checked = [], True
            split.returns_views = not written
            self._versions = _versions(split)
            return written
        if self._checked and split.returns_views and _versions(split) != self._versions:
            raise RunError(
                f"the model wrote into its input after it had not done so at first: {self.name} rows kept on the "
                "device are damaged; data.storage: stream gives it a copy each time"
            )
        return []


def _versions(split: TensorSplit) -> list[int]:
    return [column._version for column in split.columns.values() if isinstance(column, Tensor)]


class DeviceGuard:
    """Check in every step that each parameter and buffer of a module is on its device, without reading the device.

    The module's own tables are listed once, so that a replaced tensor is checked too; a check costs a tenth of a
    microsecond for each tensor.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = torch.empty(0, device=device).device  # with its index
        self._slots = [
            (table, leaf, f"{path}.{leaf}" if path else leaf)
            for path, part in module.named_modules()
            for table in (part._parameters, part._buffers)
            for leaf, tensor in table.items()
            if tensor is not None
        ]

    def check(self) -> None:
        """Raise DevicePlacementError naming the first tensor on another device."""
        for table, leaf, name in self._slots:
            tensor = table.get(leaf)
            if tensor is not None and tensor.device != self._device:
                raise DevicePlacementError(
                    f"{name} is on {tensor.device}, expected every tensor on {self._device}; it is of "
                    f"{owner_of(self._module, name)}, and something moved it during training"
                )

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Check after the work inside; if the work fails, a misplaced tensor is the better explanation."""
        try:
            yield
        except RuntimeError as error:
            try:
                self.check()
            except DevicePlacementError as cause:
                raise cause from error
            raise
        self.check()
