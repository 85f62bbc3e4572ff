"""The batch of a pass in which a worker has no rows, where passes are collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytrain.errors import RunError
from raytrain.trainable import Batch

if TYPE_CHECKING:
    from raytrain.train.loader import BatchLoader

#: Rows among which `Filler` looks for one with a weight.
FILLER_ROWS = 1000


class Filler:
    """The batch for passes in which a worker has no rows: the first training row with a weight, on the device.

    Its loss is multiplied by zero; that of a row without a weight (every label is -100) would be NaN.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader
        self._batch: Batch | None = None

    def __call__(self) -> Batch:
        """The batch, found in the first call. Raises RunError where the first rows all have no weight."""
        if self._batch is None:
            self._batch = self._found()
        return self._batch

    def _found(self) -> Batch:
        order = self._loader.batches.split.eval_order()[:FILLER_ROWS]
        for at in range(len(order)):
            micro = self._loader.one(order[at : at + 1])
            if micro.weight > 0:
                return micro.batch
        raise RunError(
            f"the first {len(order)} rows hold nothing to average over (every label is -100), and a worker"
            " without rows needs one (scale.strategy fsdp, scale.sync_batchnorm); fix data.source"
        )
