"""cuDNN's (on ROCm MIOpen's) search for the fastest kernel of each shape; turned off if shapes vary a lot."""

from __future__ import annotations

from typing import Any

import torch

#: Each new shape costs a search of a few hundred milliseconds; with more shapes than this they are not constant.
SHAPES_AT_MOST = 8


class CudnnBenchmark:
    """Controls `torch.backends.cudnn.benchmark` and counts the shapes of the batches.

    Args:
        asked: `loop.cudnn_benchmark`: true, false, or auto (on for a GPU, until there are too many shapes).
        device: device of this worker.
        deterministic: `loop.deterministic`, which requires the same kernels every time.
    """

    def __init__(self, asked: bool | str, *, device: torch.device, deterministic: bool) -> None:
        on = device.type == "cuda" and not deterministic if asked == "auto" else bool(asked)
        torch.backends.cudnn.benchmark = on
        self._counting = on and asked == "auto"
        self._shapes: set[tuple[Any, ...]] = set()

    @property
    def on(self) -> bool:
        """Whether the search is on in torch."""
        return bool(torch.backends.cudnn.benchmark)

    def observe(self, batch: dict[str, Any]) -> dict[str, Any] | None:
        """Count the shapes of a batch; return the fields of an event if this batch turns the search off."""
        if not self._counting:
            return None
        self._shapes.add(tuple((name, tuple(v.shape)) for name, v in batch.items() if isinstance(v, torch.Tensor)))
        if len(self._shapes) <= SHAPES_AT_MOST:
            return None
        torch.backends.cudnn.benchmark = self._counting = False
        return {"value": False, "shapes": len(self._shapes), "reason": f"more than {SHAPES_AT_MOST} shapes of batches"}
