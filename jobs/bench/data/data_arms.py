"""The arms of benches `data` and `clone`: JSON annotations, a small perceptron, and the seconds of each part."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.data.loading.prepare import DataPlan, prepare_source
from raytrain.data.rows.batches import Cursor, StepBatches
from raytrain.data.sources.in_memory import memory_source
from raytrain.data.transfer import to_device
from raytrain.train.loader import BatchLoader

CLASSES = 4
PARTS = ("conversion", "clone", "copy", "check", "compute")


class Annotations:
    """Rows as JSON text, converted on access; counts the conversions."""

    def __init__(self, rows: int, values: int, *, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.texts = [
            json.dumps({"values": draw.normal(size=values).round(4).tolist(), "label": int(draw.integers(CLASSES))})
            for _ in range(rows)
        ]
        self.converted = 0

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.converted += 1
        row = json.loads(self.texts[index])
        return {"x": torch.tensor(row["values"]), "labels": torch.tensor(row["label"])}


class Seconds:
    """Seconds by part, epoch by epoch."""

    def __init__(self) -> None:
        self.preparation = 0.0
        self.epochs: list[dict[str, float]] = []

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Adds the time spent inside to this part of the current epoch."""
        begin = time.perf_counter()
        yield
        self.epochs[-1][part] += time.perf_counter() - begin

    def begin_epoch(self) -> None:
        """Begin a new epoch."""
        self.epochs.append(dict.fromkeys(PARTS, 0.0))

    def parts(self) -> dict[str, float]:
        """Each part over all epochs, and the preparation."""
        return {"preparation": self.preparation, **{part: sum(e[part] for e in self.epochs) for part in PARTS}}

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return sum(self.parts().values())

    def busy(self) -> list[float]:
        """The fraction of each epoch that the model computes."""
        return [epoch["compute"] / max(sum(epoch.values()), 1e-12) for epoch in self.epochs]


class Perceptron:
    """The trained model, the same in every arm."""

    def __init__(self, values: int, hidden: int, *, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(values, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)).to(device)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self._device = device
        self.losses: list[Tensor] = []

    def step(self, batch: dict[str, Any]) -> None:
        """One step on a batch on the device; waits for the device, so that the time covers the whole step."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.module(batch["x"]), batch["labels"])
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())
        synchronize(self._device)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU computes synchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def order_of(rows: int, batch: int, epochs: int, *, seed: int) -> list[list[np.ndarray]]:
    """The sample indices of every step of every epoch, in training order."""
    loader = StepBatches(memory_source({"x": torch.zeros(rows)}, None, fraction=0.0).train,
                       seed=seed, global_batch_size=batch, micro_batch=batch)  # fmt: skip
    return [list(loader.epoch_indices(epoch)) for epoch in range(epochs)]


def clone_and_copy(
    data: Annotations, order: list[list[np.ndarray]], model: Perceptron, *, device: torch.device
) -> Seconds:
    """The reference path: each epoch converts all annotations again, clones each batch and copies it."""
    spent = Seconds()
    for epoch in order:
        spent.begin_epoch()
        for indices in epoch:
            with spent.of("conversion"):
                rows = [data[index] for index in indices.tolist()]
                batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            with spent.of("clone"):
                batch = {name: tensor.clone() for name, tensor in batch.items()}
            with spent.of("copy"):
                batch = {name: tensor.to(device) for name, tensor in batch.items()}
                synchronize(device)
            with spent.of("compute"):
                model.step(batch)
    return spent


def resident(
    data: Annotations, model: Perceptron, *, batch: int, epochs: int, seed: int, device: torch.device
) -> Seconds:
    """raytrain's path: one preparation pass, rows kept on the device, batches gathered there."""
    spent = Seconds()
    begin = time.perf_counter()
    plan = DataPlan("resident", seed=seed)
    source = prepare_source(
        memory_source(data, None, fraction=0.0), plan, device=device, report=lambda kind, **fields: None
    )
    spent.preparation = time.perf_counter() - begin
    batches = StepBatches(source.train, seed=seed, global_batch_size=batch, micro_batch=batch, storage=None)
    loader = BatchLoader(batches, device=device, weight=None, dtype=torch.float32)
    cursor = Cursor()
    for epoch in range(epochs):
        spent.begin_epoch()
        while cursor.epoch == epoch:
            with spent.of("copy"):  # rows gathered on the device
                indices, cursor = loader.global_batch(cursor)
                (micro,) = loader.micro_batches(indices)
                synchronize(device)
            with spent.of("check"):
                batch_on_device = to_device(micro.batch, device)
            with spent.of("compute"):
                model.step(batch_on_device)
    return spent
