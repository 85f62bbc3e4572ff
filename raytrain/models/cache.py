"""The key/value cache of a language model that generates: each layer's keys and values of the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class _Layer:
    keys: Tensor  # (B, H, capacity, d)
    values: Tensor


class KeyValueCache:
    """Keys and values of B sequences of different lengths; rows are padded at the end.

    The first pass appends the prompts, each later one a token of every row. A row's next token overwrites its padding,
    so nothing that is read was ever padding.

    Args:
        lengths: tokens of each prompt, at least 1.
        capacity: tokens of the longest row at the end.

    Attributes:
        lengths: tokens of each row before the pass, on the host.
        positions_B: the same, on the device of the first keys.
    """

    def __init__(self, lengths: list[int], *, capacity: int) -> None:
        self.lengths = [0] * len(lengths)
        self.positions_B = torch.zeros(len(lengths), dtype=torch.int64)
        self._prompts, self._capacity = list(lengths), capacity
        self._layers: dict[int, _Layer] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the prompts have not been seen yet."""
        return not any(self.lengths)

    def positions(self, device: torch.device) -> Tensor:
        """(B, 1): the position of each row's next token."""
        self.positions_B = self.positions_B.to(device)
        return self.positions_B.unsqueeze(1)

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        """Add a layer's keys and values of a later pass; return the attention of its queries, all (B, H, 1, d)."""
        held = self._layers[id(layer)]
        at = self.positions_B
        rows = torch.arange(len(at), device=at.device)
        held.keys[rows, :, at], held.values[rows, :, at] = k[:, :, 0], v[:, :, 0]
        end, begin = max(self.lengths) + 1, 0
        if window is not None:
            begin = max(0, min(self.lengths) + 1 - window)
        mask = self._mask(begin, end, window, q.device)
        return F.scaled_dot_product_attention(q, held.keys[:, :, begin:end], held.values[:, :, begin:end], mask)

    def _mask(self, begin: int, end: int, window: int | None, device: torch.device) -> Tensor | None:
        """(B, 1, 1, end - begin) bool: the tokens that each row sees; None if all rows see all of them."""
        if min(self.lengths) + 1 == end:
            return None
        place = torch.arange(begin, end, device=device)
        own = self.positions_B.unsqueeze(1)
        seen = place <= own
        if window is not None:
            seen &= place > own - window
        return seen[:, None, None]

    def start(self, layer: nn.Module, k: Tensor, v: Tensor) -> None:
        """Keep a layer's keys and values of the prompts, (B, H, S, d)."""
        B, H, S, d = k.shape
        # zeros: a masked value that is not finite would still make the sum NaN
        held = _Layer(k.new_zeros(B, H, self._capacity, d), v.new_zeros(B, H, self._capacity, d))
        held.keys[:, :, :S], held.values[:, :, :S] = k, v
        self._layers[id(layer)] = held

    def end_pass(self, x_BSD: Tensor) -> Tensor:
        """Count the tokens of a pass that all layers have seen; return what follows each row's last one, (B, 1, D)."""
        if self.is_empty:
            last = torch.tensor(self._prompts, device=x_BSD.device) - 1
            x_BSD = x_BSD[torch.arange(len(last), device=x_BSD.device), last].unsqueeze(1)
        added = self._prompts if self.is_empty else [1] * len(self.lengths)
        self.lengths = [have + more for have, more in zip(self.lengths, added, strict=True)]
        self.positions_B = torch.tensor(self.lengths, device=self.positions_B.device)
        return x_BSD

    def keep(self, rows: list[int]) -> None:
        """Keep these rows only, in this order: the others have ended."""
        self.lengths = [self.lengths[row] for row in rows]
        index = torch.tensor(rows, device=self.positions_B.device)
        self.positions_B = self.positions_B[index]
        for held in self._layers.values():
            end = max(self.lengths)
            for name in ("keys", "values"):
                full: Tensor = getattr(held, name)
                smaller = full.new_zeros(len(rows), *full.shape[1:])
                smaller[:, :, :end] = full[index, :, :end]
                setattr(held, name, smaller)
