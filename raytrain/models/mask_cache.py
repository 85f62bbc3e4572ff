"""Attention masks kept for the next call, within a budget of bytes; for shapes that need a mask at all.

Plain causal attention needs none (`is_causal`). A mask that depends on nothing but lengths, such as a sliding
window's, is the same in every layer and step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

#: Bytes, unless `loop.mask_cache_mb` says otherwise.
BUDGET = 8 * 2**20

Key = tuple[str, int, torch.device, torch.dtype]


class MaskCache:
    """Least recently used masks leave first. Not part of a module's state: neither saved nor pickled.

    Args:
        budget: bytes of all masks together; one that is larger is built anew each time. 0 keeps none.

    Attributes:
        hits, misses: calls of `get` so far.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.hits = self.misses = 0
        self._masks: OrderedDict[Key, Tensor] = OrderedDict()
        self._lock = threading.Lock()  # two micro-batches in flight are two threads
        self._budget = budget

    @property
    def budget(self) -> int:
        """Bytes that may be kept; lowering it lets go of masks at once."""
        return self._budget

    @budget.setter
    def budget(self, budget: int) -> None:
        with self._lock:
            self._budget = budget
            self._shrink()

    @property
    def bytes(self) -> int:
        """Of the masks that are kept."""
        return sum(mask.nbytes for mask in self._masks.values())

    def __len__(self) -> int:
        return len(self._masks)

    def get(
        self, kind: str, length: int, *, device: torch.device, dtype: torch.dtype, build: Callable[[], Tensor]
    ) -> Tensor:
        """The mask of a kind for this length, device and dtype: the same object each time, as long as it is kept.

        Compiled code builds it in place, where it costs nothing, and leaves the cache alone.
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
        """Let go of every mask; the counts stay."""
        with self._lock:
            self._masks.clear()

    def _shrink(self) -> None:
        while self.bytes > self._budget:
            self._masks.popitem(last=False)

    @classmethod
    def total(cls, caches: Iterable[MaskCache]) -> dict[str, int]:
        """{entries, bytes, hits, misses} of several, each counted once."""
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
