"""What a user's dataset draws at random: from (seed, epoch, row), whoever reads it.

Each item finds Python's, numpy's and torch's global generators seeded for it alone, in the training process as in a
loader process: the same for any number of processes, workers and micro-batches, and after a resume. A dataset that
reads many items at once (`__getitems__`) finds them seeded by the first row of its batch. Generators of its own are its
own affair. The training process gets its generators back as they were: what the model draws does not depend on who
reads.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from raytrain.data.rows.collate import collate_rows
from raytrain.data.rows.contract import Batch, Split
from raytrain.data.sources.map_style import DatasetSplit, PartlyKept


def seed_item(seed: int, epoch: int, row: int) -> None:
    """Seed Python's, numpy's and torch's generators of this process for one item."""
    told = struct.pack("<QQQ", seed % 2**64, epoch, row)
    drawn = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
    random.seed(drawn)
    np.random.seed(drawn % 2**32)
    torch.default_generator.manual_seed(drawn % 2**63)


@contextmanager
def generators_kept() -> Generator[None]:
    """Whatever is drawn or seeded inside, the generators of this process come back as they were."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)


def seeded_batch(split: DatasetSplit | PartlyKept, rows: np.ndarray, *, seed: int, epoch: int) -> Batch:
    """A batch whose items draw from generators seeded by (seed, epoch, row), in a process that draws nothing else."""
    return collate_rows(split.read(rows, before=partial(seed_item, seed, epoch)), key=split.key)


def gathered(split: Split, rows: np.ndarray, *, seed: int, epoch: int) -> Batch:
    """A batch of any split, read here: seeded where a user's dataset reads it, and no generator is touched."""
    if type(split) not in (DatasetSplit, PartlyKept):  # items that are kept draw nothing any more
        return split.gather(rows)
    assert isinstance(split, (DatasetSplit, PartlyKept))
    with generators_kept():
        return seeded_batch(split, rows, seed=seed, epoch=epoch)
