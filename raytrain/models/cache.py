"""The key/value cache of a language model that generates: each layer's keys and values of the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Elements to which kernels of attention want the rows of masks aligned: torch pads a row of another length itself, but
#: a view that begins elsewhere ended in a misaligned address on an H200.
ALIGNED = 8
#: Passes for which a static cache keeps its span.
SPAN = 128


@dataclass
class _Layer:
    keys: Tensor  # (B, H, capacity, d)
    values: Tensor


class KeyValueCache:
    """Keys and values of B sequences of different lengths, padded at the beginning.

    The first pass appends the prompts, each later one a token of every row. All rows end at the same place, so that a
    pass writes one column, and their padding never changes: one mask serves all layers and passes.

    Args:
        lengths: tokens of each prompt, at least 1.
        capacity: tokens of the longest row at the end.
        static: later passes have the same operations on the same memory until `span` changes: what a CUDA graph needs.

    Attributes:
        lengths: tokens of each row before the pass, on the host.
        positions_B: the same, on the device of the first keys.
        counts: whether a pass that has ended is counted; else it may be made again.
    """

    def __init__(self, lengths: list[int], *, capacity: int, static: bool = False) -> None:
        self.lengths = [0] * len(lengths)
        self.positions_B = torch.zeros(len(lengths), dtype=torch.int64)
        self._prompts, self._capacity = list(lengths), -(-capacity // ALIGNED) * ALIGNED
        self._paddings = [max(lengths) - length for length in lengths]
        self._begin, self._end = 0, max(lengths)
        self._layers: dict[int, _Layer] = {}
        self._seen: Tensor | None = None  # (B, 1, 1, capacity): 0 for tokens, -inf for padding; None without padding
        self.static, self.counts = static, True
        self._masks: dict[int | None, Tensor] = {}  # of a static cache by window: `_seen` without later columns
        self._at = torch.tensor([self._end])  # on the device

    @property
    def is_empty(self) -> bool:
        """Whether the prompts have not been seen yet."""
        return not any(self.lengths)

    @property
    def span(self) -> int | None:
        """Columns that the next pass of a static cache reads, the same for `SPAN` passes; None if it is not static."""
        begin = max(self._prompts)
        columns = begin + ((self._end - begin) // SPAN + 1) * SPAN
        return min(self._capacity, -(-columns // ALIGNED) * ALIGNED) if self.static else None

    def positions(self, device: torch.device) -> Tensor:
        """(B, 1): the position of each row's next token."""
        self.positions_B = self.positions_B.to(device)
        return self.positions_B.unsqueeze(1)

    def attend(self, layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        """Add a layer's keys and values of a later pass; return the attention of its queries, all (B, H, 1, d)."""
        held, at, mask = self._layers[id(layer)], self._end, self._seen
        begin, end = self._begin if window is None else max(self._begin, at + 1 - window), at + 1
        if not self.static:
            held.keys[:, :, at:end], held.values[:, :, at:end] = k, v
        else:
            if window not in self._masks:
                self._at, mask = self._at.to(q.device), self._mask(q)
                mask[..., end:] = mask[..., :begin] = -torch.inf
                self._masks[window] = mask
            held.keys.index_copy_(2, self._at, k)
            held.values.index_copy_(2, self._at, v)
            begin, end, mask = 0, self.span, self._masks[window]
        if mask is not None:
            mask = mask[..., begin:end]
            if begin % ALIGNED:
                mask = mask.clone()
        return F.scaled_dot_product_attention(q, held.keys[:, :, begin:end], held.values[:, :, begin:end], mask)

    def start(self, layer: nn.Module, k: Tensor, v: Tensor) -> None:
        """Keep a layer's keys and values of the prompts, (B, H, S, d), whose rows are padded at the end."""
        B, H, S, d = k.shape
        # zeros: a masked value that is not finite would still make the sum NaN
        held = _Layer(k.new_zeros(B, H, self._capacity, d), v.new_zeros(B, H, self._capacity, d))
        if any(self._paddings):
            for row, (length, padding) in enumerate(zip(self._prompts, self._paddings, strict=True)):
                held.keys[row, :, padding:S], held.values[row, :, padding:S] = k[row, :, :length], v[row, :, :length]
            if self._seen is None:
                self._seen = self._mask(k)
        else:
            held.keys[:, :, :S], held.values[:, :, :S] = k, v
        self._layers[id(layer)] = held

    def _mask(self, like: Tensor) -> Tensor:
        """In the format of the queries: a mask of bools would be converted in every layer of every pass."""
        paddings = torch.tensor(self._paddings, device=like.device).unsqueeze(1)
        padding = torch.arange(self._capacity, device=like.device) < paddings
        return like.new_zeros(padding.shape).masked_fill_(padding, -torch.inf)[:, None, None]

    def end_pass(self, x_BSD: Tensor) -> Tensor:
        """Count the tokens of a pass that all layers have seen; return what follows each row's last one, (B, 1, D)."""
        if self.is_empty:
            last = torch.tensor(self._prompts, device=x_BSD.device) - 1
            x_BSD = x_BSD[torch.arange(len(last), device=x_BSD.device), last].unsqueeze(1)
        if self.counts:
            self.advance()
        return x_BSD

    def advance(self) -> None:
        """Count the tokens of a pass."""
        if self.is_empty:
            self.lengths = list(self._prompts)
            self.positions_B = torch.tensor(self.lengths, device=self.positions_B.device)
        else:
            self.lengths = [length + 1 for length in self.lengths]
            self.positions_B += 1
            self._end += 1
            self._at += self.static
            for window, mask in self._masks.items() if self._end < self._capacity else ():
                mask.index_fill_(3, self._at, 0.0)
                if window is not None and self._end >= window:
                    mask.index_fill_(3, self._at - window, -torch.inf)

    def keep(self, rows: list[int]) -> None:
        """Keep these rows only, in this order: the others have ended."""
        self.lengths = [self.lengths[row] for row in rows]
        self._paddings = [self._paddings[row] for row in rows]
        self._begin = min(self._paddings)
        index = torch.tensor(rows, device=self.positions_B.device)
        self.positions_B = self.positions_B[index]
        if self._seen is not None:
            self._seen = self._seen[index] if max(self._paddings) > self._begin else None
        self._masks = {window: mask[index] for window, mask in self._masks.items()}
        for held in self._layers.values():
            for name in ("keys", "values"):
                full: Tensor = getattr(held, name)
                smaller = full.new_zeros(len(rows), *full.shape[1:])
                smaller[:, :, self._begin : self._end] = full[index, :, self._begin : self._end]
                setattr(held, name, smaller)
