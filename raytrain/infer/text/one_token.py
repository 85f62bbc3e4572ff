"""The pass of one token a row as a CUDA graph: one launch where the module would make hundreds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from raytrain.errors import first_line
from raytrain.models.cache import KeyValueCache
from raytrain.train.memory.device import is_out_of_memory

#: Fewer passes are over sooner than a graph is made, which takes three.
LEAST_PASSES = 16
#: Modules whose pass cannot be captured: it reads the device, for example.
REFUSED: WeakSet[nn.Module] = WeakSet()


class OneTokenPasses:
    """Calls a module with a row's last token and the cache; with a static cache through a graph, which is made again
    when the cache has fewer rows or a longer span."""

    def __init__(self, module: nn.Module, cache: Any) -> None:
        self.module, self.cache = module, cache
        self._static = isinstance(cache, KeyValueCache) and cache.span is not None
        self._shape: tuple[int, int] | None = None
        self._replay: Callable[[], None] | None = None
        if self._static:
            cache.counts = False  # here instead: a pass that is made again writes the same column

    def __call__(self, tokens_B: Tensor, *, left: int) -> Tensor:
        """(B, V) logits, which the next call may overwrite.

        Args:
            left: passes that may still follow, with this one.
        """
        if not self._static:
            return self._run(tokens_B)
        shape = (len(tokens_B), self.cache.span)
        if shape != self._shape:
            self._shape, self._replay = shape, None
            if left >= LEAST_PASSES and self.module not in REFUSED:
                self._record(tokens_B)
        if self._replay is None:
            logits_BV = self._run(tokens_B)
        else:
            self._tokens_B.copy_(tokens_B)
            self._replay()
            logits_BV = self._logits_BV
        self.cache.advance()
        return logits_BV

    def _record(self, tokens_B: Tensor) -> None:
        self._tokens_B = tokens_B.clone()
        try:
            self._replay, self._logits_BV = record(lambda: self._run(self._tokens_B), tokens_B.device)
        except RuntimeError as error:
            if is_out_of_memory(error, device=tokens_B.device):
                raise
            REFUSED.add(self.module)
            print(f"passes of one token are not captured: {first_line(error)}", file=sys.stderr)

    def _run(self, tokens_B: Tensor) -> Tensor:
        output: Any = self.module(input_ids=tokens_B.unsqueeze(1), cache=self.cache)
        return (output["logits"] if isinstance(output, dict) else output.logits)[:, -1]


def record(run: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """Capture what a function does on a CUDA device; returns what does it again, and its output.

    Raises:
        RuntimeError: it waits for the device, or cannot be captured.
    """
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # compiles, compares and allocates what only the first pass does
        torch.cuda.set_sync_debug_mode("error")  # tells of a read before a capture is spoilt by it
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        output = run()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay, output
