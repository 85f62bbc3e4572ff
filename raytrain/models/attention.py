"""Causal self-attention, full or in a sliding window, without S x S weights, and the key/value cache for generation.

Used by the GPT models here and in `experts.models`; generation passes the cache in.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Attention", "MaskCache"]


# ---------------------------------------------------------------- cache
# The key/value cache of a language model that generates: each layer's keys and values of the tokens so far.


#: Elements to which kernels of attention want the rows of masks aligned: torch pads a row of another length itself, but
#: a view that begins elsewhere ended in a misaligned address on an H200.
ALIGNED = 8
#: Passes for which a static cache keeps its span.
SPAN = 128


class KeyValueCache:
    """Keys and values of B sequences of different lengths, padded at the beginning, with room for the longest at the
    end.

    The first pass appends the prompts, each later one a token of every row. All rows end at the same place, so that a
    pass writes one column, and their padding never changes: one mask serves all layers and passes. If `static`, later
    passes have the same operations on the same memory until `span` changes: what a CUDA graph needs."""

    def __init__(self, lengths: list[int], *, capacity: int, static: bool = False) -> None:
        self.lengths = [0] * len(lengths)  # tokens of each row before the pass, on the host, then on the keys' device
        self.positions_B = torch.zeros(len(lengths), dtype=torch.int64)
        self._prompts, self._capacity = list(lengths), -(-capacity // ALIGNED) * ALIGNED
        self._paddings = [max(lengths) - length for length in lengths]
        self._begin, self._end = 0, max(lengths)
        self._layers: dict[int, list[Tensor]] = {}  # keys and values of a layer, each (B, H, capacity, d)
        self._seen: Tensor | None = None  # (B, 1, 1, capacity): 0 for tokens, -inf for padding; None without padding
        self.static, self.counts = static, True  # whether a pass that has ended is counted; else it may be made again
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
        (keys, values), at, mask = self._layers[id(layer)], self._end, self._seen
        begin, end = self._begin if window is None else max(self._begin, at + 1 - window), at + 1
        if not self.static:
            keys[:, :, at:end], values[:, :, at:end] = k, v
        else:
            if window not in self._masks:
                self._at, mask = self._at.to(q.device), self._mask(q)
                mask[..., end:] = mask[..., :begin] = -torch.inf
                self._masks[window] = mask
            keys.index_copy_(2, self._at, k)
            values.index_copy_(2, self._at, v)
            begin, end, mask = 0, self.span, self._masks[window]
        if mask is not None:
            mask = mask[..., begin:end]
            if begin % ALIGNED:
                mask = mask.clone()
        return F.scaled_dot_product_attention(q, keys[:, :, begin:end], values[:, :, begin:end], mask)

    def start(self, layer: nn.Module, k: Tensor, v: Tensor) -> None:
        """Keep a layer's keys and values of the prompts, (B, H, S, d), whose rows are padded at the end."""
        B, H, S, d = k.shape
        # zeros: a masked value that is not finite would still make the sum NaN
        keys, values = k.new_zeros(B, H, self._capacity, d), v.new_zeros(B, H, self._capacity, d)
        if any(self._paddings):
            for row, (length, padding) in enumerate(zip(self._prompts, self._paddings, strict=True)):
                keys[row, :, padding:S], values[row, :, padding:S] = k[row, :, :length], v[row, :, :length]
            if self._seen is None:
                self._seen = self._mask(k)
        else:
            keys[:, :, :S], values[:, :, :S] = k, v
        self._layers[id(layer)] = [keys, values]

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
            for place, full in enumerate(held):
                held[place] = full.new_zeros(len(rows), *full.shape[1:])
                held[place][:, :, self._begin : self._end] = full[index, :, self._begin : self._end]


# ---------------------------------------------------------------- attention
# Causal self-attention, full or in a sliding window, without S x S weights; full attention needs no mask.


#: Default bytes of a mask cache; set by `loop.mask_cache_mb`.
BUDGET = 8 * 2**20

Key = tuple[str, int, torch.device, torch.dtype]


class MaskCache:
    """An LRU cache of attention masks. It is not part of a module's state: masks are neither saved nor pickled.

    Args:
        budget: total bytes of all masks; a larger mask is rebuilt on each call. 0 disables the cache.

    Attributes:
        hits, misses: numbers of calls of `get`.

    Example:
        >>> import torch
        >>> from raytrain.models.attention import MaskCache, window_mask
        >>> cpu, masks = torch.device("cpu"), MaskCache(budget=2**20)
        >>> def mask(length):
        ...     build = lambda: window_mask(length, device=cpu)
        ...     return masks.get("window", length, device=cpu, dtype=torch.bool, build=build)
        >>> mask(16) is mask(16)  # built once for each length, device and dtype
        True
        >>> MaskCache.total([masks])
        {'entries': 1, 'bytes': ..., 'hits': 1, 'misses': 1}
        >>> masks.clear()
        >>> len(masks), masks.bytes, masks.budget
        (0, 0, 1048576)
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.hits = self.misses = 0
        self._masks: OrderedDict[Key, Tensor] = OrderedDict()
        self._lock = threading.Lock()  # two micro-batches in flight are two threads
        self._budget = budget

    @property
    def budget(self) -> int:
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        with self._lock:
            self._budget = budget
            self._shrink()

    @property
    def bytes(self) -> int:
        return sum(mask.nbytes for mask in self._masks.values())

    def __len__(self) -> int:
        return len(self._masks)

    def get(
        self, kind: str, length: int, *, device: torch.device, dtype: torch.dtype, build: Callable[[], Tensor]
    ) -> Tensor:
        """Return the mask of a kind for this length, device and dtype; the same object while it is cached.

        Compiled code builds the mask inline, which costs nothing, and does not use the cache.
        """
        if torch.compiler.is_compiling():
            return build()
        key = (kind, length, device, dtype)
        with self._lock:
            mask = self._masks.get(key)
            if mask is not None:
                self.hits += 1
                self._masks.move_to_end(key)
                return mask
            self.misses += 1
            mask = build()
            if mask.nbytes <= self._budget:
                self._masks[key] = mask
                self._shrink()
            return mask

    def clear(self) -> None:
        with self._lock:
            self._masks.clear()

    def _shrink(self) -> None:
        while self.bytes > self._budget:
            self._masks.popitem(last=False)

    @classmethod
    def total(cls, caches: Iterable[MaskCache]) -> dict[str, int]:
        """Return {entries, bytes, hits, misses} summed over distinct caches."""
        each = list({id(cache): cache for cache in caches}.values())
        return {
            "entries": sum(len(cache) for cache in each),
            "bytes": sum(cache.bytes for cache in each),
            "hits": sum(cache.hits for cache in each),
            "misses": sum(cache.misses for cache in each),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {"budget": self._budget}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["budget"])


class Attention(nn.Module):
    """Causal self-attention with one fused projection; no bias (its key bias would have no gradient).

    Args:
        window: each token attends to itself and the `window - 1` tokens before it; None = all tokens before it.

    Example:
        >>> import torch
        >>> from raytrain.models.attention import Attention
        >>> attention = Attention(16, 2, 0.0)  # width, heads, dropout
        >>> x = torch.randn(1, 8, 16)
        >>> torch.allclose(attention(x)[:, :5], attention(x[:, :5]), atol=1e-6)  # no token sees a later one
        True
    """

    def __init__(self, width: int, heads: int, dropout: float, *, window: int | None = None) -> None:
        super().__init__()
        self.heads, self.dropout, self.window = heads, dropout, window
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        if window is not None:
            self.masks = MaskCache()

    def forward(self, x_BSD: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D); with a cache, S is the prompts' padded length, later 1."""
        B, S, D = x_BSD.shape
        parts = self.qkv(x_BSD).split(D, dim=2)
        q, k, v = (part.view(B, S, self.heads, D // self.heads).transpose(1, 2) for part in parts)
        if cache is not None:
            if not cache.is_empty:
                y = cache.attend(self, q, k, v, window=self.window)
                return self.out(y.transpose(1, 2).reshape(B, S, D))
            cache.start(self, k, v)
        dropout = self.dropout if self.training else 0.0
        if self.window is None or self.window >= S:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            y = windowed_attention(q, k, v, window=self.window, masks=self.masks, dropout=dropout)
        return self.out(y.transpose(1, 2).reshape(B, S, D))

    def _apply(self, fn: object, recurse: bool = True) -> Attention:
        if self.window is not None:  # to another device or dtype
            self.masks.clear()
        return super()._apply(fn, recurse)  # pyright: ignore[reportArgumentType, reportReturnType]


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, masks: MaskCache, dropout: float = 0.0
) -> Tensor:
    """Attention of each token to itself and the `window - 1` tokens before it; (B, H, S, d) with S > window.

    The sequence is split into chunks of the window's length. Queries attend only to keys of their own and the previous
    chunk, so time and memory grow with S x window instead of S x S, and all chunks share one mask (window, 2 window).
    """
    S = q.shape[2]
    chunks = -(-S // window)
    q, k, v = (
        F.pad(part, (0, 0, 0, chunks * window - S)) for part in (q, k, v)
    )  # after every query: never attended to
    first = F.scaled_dot_product_attention(
        q[:, :, :window], k[:, :, :window], v[:, :, :window], dropout_p=dropout, is_causal=True
    )
    mask = masks.get(
        "window", window, device=q.device, dtype=torch.bool, build=lambda: window_mask(window, device=q.device)
    )
    rest = F.scaled_dot_product_attention(
        _chunks(q[:, :, window:], window), _pairs(k, window), _pairs(v, window), attn_mask=mask, dropout_p=dropout
    )
    B, H, _, d = q.shape
    rest = rest.view(B, chunks - 1, H, window, d).transpose(1, 2).reshape(B, H, (chunks - 1) * window, d)
    return torch.cat([first, rest], dim=2)[:, :, :S]


def window_mask(window: int, *, device: torch.device) -> Tensor:
    """(window, 2 window) bool: may query i of a chunk attend to key j of the previous and own chunk?"""
    i = torch.arange(window, device=device).unsqueeze(1)
    j = torch.arange(2 * window, device=device)
    return (j > i) & (j <= i + window)


def _chunks(x: Tensor, window: int) -> Tensor:
    """(B, H, n window, d) -> (B n, H, window, d)."""
    B, H, S, d = x.shape
    return x.view(B, H, S // window, window, d).transpose(1, 2).reshape(-1, H, window, d)


def _pairs(x: Tensor, window: int) -> Tensor:
    """Each chunk but the first, appended to the previous chunk: (B, H, (n + 1) window, d) -> (B n, H, 2 window, d)."""
    return torch.cat([_chunks(x[:, :, :-window], window), _chunks(x[:, :, window:], window)], dim=2)
