"""A row for the passes of the others that a worker has no rows for."""

from __future__ import annotations

from raytrain.errors import RunError
from raytrain.train.loader import BatchLoader
from raytrain.trainable import Batch

#: So many rows are looked at for one that weighs something.
LOOKED_AT = 1000


class Filler:
    """The first training row that weighs something, as a batch on the device; found once.

    What is computed with it is multiplied by zero: a row that weighs nothing (every label is -100) would give NaN.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader
        self._batch: Batch | None = None

    def __call__(self) -> Batch:
        """Raises RunError where the first rows all weigh nothing."""
        if self._batch is None:
            self._batch = self._found()
        return self._batch

    def _found(self) -> Batch:
        order = self._loader.batches.split.eval_order()[:LOOKED_AT]
        for at in range(len(order)):
            micro = self._loader.one(order[at : at + 1])
            if micro.weight > 0:
                return micro.batch
        raise RunError(
            f"the first {len(order)} rows hold nothing to average over (every label is -100), and under"
            " scale.strategy fsdp a worker without rows needs one; mend data.source"
        )
