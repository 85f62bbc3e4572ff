"""The parts of bench `claims` about data: rows kept on the device, habits that cost time, loader processes, pinning."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, alternate, equal_series, median_interval
from jobs.bench.harness.sessions import DEVICE, SessionArm, draw_rows, job_of, perceptron_model, synchronize, timed
from raytrain.data.prepare import DataPlan, prepare_source
from raytrain.data.rows.batches import Cursor, StepBatches
from raytrain.data.rows.residency import pin, to_device
from raytrain.data.sources.in_memory import memory_source
from raytrain.train.loader import BatchLoader

CLASSES = 4
#: Width of the perceptron that trains on the rows.
WIDTH = 16

# ---------------------------------------------------------------- rows kept on the device

OLD, NEW = "clone and copy", "resident"
PARTS = ("conversion", "clone", "copy", "check", "compute")
#: Seconds of all epochs of the old path over those of ours.
GOAL = Goal(at_least=4.2)
#: Largest fraction of an arm's wall time that no part accounts for.
UNACCOUNTED = 0.02


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
    """Seconds of the preparation, and `parts` (epochs, PARTS) of each epoch."""

    def __init__(self, epochs: int) -> None:
        self.preparation, self.parts = 0.0, np.zeros((epochs, len(PARTS)))

    @contextmanager
    def spent_on(self, part: str, epoch: int) -> Iterator[None]:
        """Adds the time spent inside to this part of an epoch."""
        begin = time.perf_counter()
        yield
        self.parts[epoch, PARTS.index(part)] += time.perf_counter() - begin

    @property
    def total(self) -> float:
        return self.preparation + float(self.parts.sum())


class Perceptron:
    """The trained model, the same in every arm."""

    def __init__(self, values: int, hidden: int, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(values, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.losses: list[float] = []

    def step(self, batch: dict[str, Any]) -> None:
        """One step on a batch on the device; waits for the device, so that the time covers the whole step."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.module(batch["x"]), batch["labels"])
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        synchronize()


def order_of(rows: int, batch: int, epochs: int, *, seed: int) -> list[list[np.ndarray]]:
    """The sample indices of every step of every epoch, in training order."""
    split = memory_source({"x": torch.zeros(rows)}, None, fraction=0.0).train
    batches = StepBatches(split, seed=seed, global_batch_size=batch, micro_batch=batch)
    return [list(batches.epoch_indices(epoch)) for epoch in range(epochs)]


def clone_and_copy(data: Annotations, order: list[list[np.ndarray]], model: Perceptron) -> Seconds:
    """The reference path: each epoch converts all annotations again, clones each batch and copies it."""
    spent = Seconds(len(order))
    for epoch, steps in enumerate(order):
        for indices in steps:
            with spent.spent_on("conversion", epoch):
                rows = [data[index] for index in indices.tolist()]
                batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            with spent.spent_on("clone", epoch):
                batch = {name: tensor.clone() for name, tensor in batch.items()}
            with spent.spent_on("copy", epoch):
                batch = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
                synchronize()
            with spent.spent_on("compute", epoch):
                model.step(batch)
    return spent


def resident(data: Annotations, model: Perceptron, *, batch: int, epochs: int, seed: int) -> Seconds:
    """raytrain's path: one preparation pass, rows kept on the device, batches gathered there."""
    spent = Seconds(epochs)
    begin = time.perf_counter()
    source = prepare_source(
        memory_source(data, None, fraction=0.0), DataPlan("resident", seed=seed), device=DEVICE,
        report=lambda kind, **fields: None,
    )  # fmt: skip
    spent.preparation = time.perf_counter() - begin
    batches = StepBatches(source.train, seed=seed, global_batch_size=batch, micro_batch=batch)
    loader = BatchLoader(batches, device=DEVICE, weight=None, dtype=torch.float32)
    cursor = Cursor()
    while (epoch := cursor.epoch) < epochs:
        with spent.spent_on("copy", epoch):  # rows gathered on the device
            indices, cursor = loader.global_batch(cursor)
            (micro,) = loader.micro_batches(indices)
            synchronize()
        with spent.spent_on("check", epoch):
            on_device = to_device(micro.batch, DEVICE)
        with spent.spent_on("compute", epoch):
            model.step(on_device)
    return spent


def measure_resident(options: Any, found: BenchMeasurement) -> None:
    """Rows converted once and kept on the device, against converting, cloning and copying them in each epoch."""
    data = Annotations(options.annotations, options.values, seed=options.seed)
    order = order_of(options.annotations, options.data_batch, options.epochs, seed=options.seed)
    spent: dict[str, list[Seconds]] = {OLD: [], NEW: []}
    losses: dict[str, list[float]] = {}
    converted: dict[str, int] = {}

    def block(name: str) -> float:
        model = Perceptron(options.values, WIDTH, seed=options.seed)
        data.converted, begin = 0, time.perf_counter()
        if name == OLD:
            seconds = clone_and_copy(data, order, model)
        else:
            seconds = resident(data, model, batch=options.data_batch, epochs=options.epochs, seed=options.seed)
        wall = time.perf_counter() - begin
        spent[name].append(seconds)
        converted[name], losses[name] = data.converted, model.losses
        return wall

    walls = alternate({name: partial(block, name) for name in spent}, blocks=options.repeats)
    kept = {name: seconds[-options.repeats :] for name, seconds in spent.items()}
    found.values["seconds_of_all_epochs"] = walls
    found.gate(equal_series("both arms have the same losses", losses[NEW], losses[OLD]))
    # the resident arm reads the first item a few more times, to determine its size
    once = len(data) <= converted[NEW] <= len(data) + 8 and converted[OLD] == len(data) * options.epochs
    detail = f"{converted[NEW]} against {converted[OLD]} conversions of {len(data)} annotations"
    found.gate(Check("converted once, against once an epoch", once, detail))
    for name, seconds in kept.items():
        worst = max(abs(wall - one.total) / wall for wall, one in zip(walls[name], seconds, strict=True))
        allowed = UNACCOUNTED if not found.quick else 1.0
        found.gate(Check(f"{name}: the total is the sum of its parts", worst <= allowed, f"within {worst:.2%}"))
    _judge_resident(found, walls, kept)


def _judge_resident(found: BenchMeasurement, walls: dict[str, list[float]], kept: dict[str, list[Seconds]]) -> None:
    """The ratios by epoch, the seconds of each part, and the fraction of the time that the model computes."""
    prepared = {name: np.array([one.preparation for one in seconds]) for name, seconds in kept.items()}
    parts = {name: np.stack([one.parts for one in seconds]) for name, seconds in kept.items()}
    epochs = {name: table.sum(axis=2) for name, table in parts.items()}  # (repeats, epochs)
    first = {name: table[:, 0] for name, table in epochs.items()}
    both = {name: prepared[name] + first[name] for name in first}
    found.compare(walls, of=OLD, to=NEW, name="all epochs", goal=GOAL)
    found.compare(both, of=OLD, to=NEW, name="first epoch, preparation included")
    found.compare(first, of=OLD, to=NEW, name="first epoch, preparation apart")
    every = {name: table[:, 1:].sum(axis=1) for name, table in epochs.items()}
    later = found.compare(every, of=OLD, to=NEW, name="every later epoch")
    found.claim("2 to 5 times with rows loaded in advance", later.low >= 2, f"{later.median:.2f} times, epoch by epoch")
    cost = float(np.median(prepared[NEW] / first[OLD]))
    found.claim(
        "the preparation is a one-time cost of about one epoch of conversions", 0.5 < cost < 1.5,
        f"{cost:.2f} of an epoch of the old path",
    )  # fmt: skip
    medians: dict[str, dict[str, float]] = {}
    busy: dict[str, list[float]] = {}
    for name, table in parts.items():
        columns = [prepared[name], *table.sum(axis=1).T]
        medians[name] = dict(zip(("preparation", *PARTS), map(float, np.median(columns, axis=1)), strict=True))
        medians[name]["total"] = sum(medians[name].values())
        busy[name] = np.median(table[:, :, PARTS.index("compute")] / epochs[name], axis=0).tolist()
        shown = ", ".join(f"{part} {value:.3f}" for part, value in medians[name].items())
        found.say(f"{name}, seconds: {shown}")
    found.values |= {"parts_s": medians, "busy_share_by_epoch": busy}
    low, high = (sum(busy[name]) / len(busy[name]) for name in (OLD, NEW))
    found.claim(
        "the fraction of time that the model computes rises from 5-20 % to 70-95 %", high >= 0.7 and low <= 0.2,
        f"from {low:.0%} to {high:.0%} of an epoch",
    )  # fmt: skip


# ---------------------------------------------------------------- habits


def measure_habits(options: Any, found: BenchMeasurement) -> None:
    """Steps with cloned batches, and with moves of tensors that are already on the device.

    The dataset is larger than the caches, and a small model reads each row about once, so that the first access to the
    rows waits for memory. On a CPU a clone reads them sequentially and leaves them in the cache for the step; not
    cloning is therefore not necessarily faster there.
    """
    size = options.data_batch
    rows = draw_rows(16 * size, options.values, classes=CLASSES, seed=options.seed)
    batches = [{n: column[at : at + size].to(DEVICE) for n, column in rows.items()} for at in range(0, 16 * size, size)]
    ways: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
        "cloned": lambda batch: {name: tensor.clone() for name, tensor in batch.items()},
        "not cloned": lambda batch: to_device(batch, DEVICE),
        "always moved": lambda batch: {name: tensor.to(DEVICE) for name, tensor in batch.items()},
    }
    models = {name: Perceptron(options.values, WIDTH, seed=options.seed) for name in ways}

    def train(name: str) -> None:
        for number in range(options.block_steps):
            models[name].step(ways[name](batches[number % len(batches)]))

    arms = {name: partial(timed, partial(train, name)) for name in ways}
    times = found.alternate(arms, blocks=options.blocks, named="batches {}")
    for name in ("cloned", "always moved"):
        label = f"batches {name}: the losses are unchanged"
        found.gate(equal_series(label, models[name].losses, models["not cloned"].losses))
    clone = found.compare(times, of="cloned", to="not cloned")
    check = found.compare(times, of="always moved", to="not cloned", name="always moved / device checked first")
    found.claim(
        "batches that are not cloned train 1.2 to 1.3 times as fast", clone.low >= 1.2,
        f"{clone} with a small model and {size * options.values * 4 / 1e6:.1f} MB a batch",
    )  # fmt: skip
    found.claim(
        "checking the device before a move makes a step 1.1 to 1.2 times as fast", check.low >= 1.1,
        f"{check}: torch checks it too",
    )  # fmt: skip


# ---------------------------------------------------------------- a loader process

#: Fraction of the reading time that one loader process should hide.
HIDDEN = Goal(at_least=0.6)
LOAD_BATCH = 8


class ComputedItems:
    """A dataset whose items each run `rounds` iterations of a Python loop, which holds the interpreter lock."""

    def __init__(self, rows: int, width: int) -> None:
        self.rows, self.width, self.rounds = rows, width, 1

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        value = 0.0
        for _ in range(self.rounds):
            value += 1.0
        return {"x": torch.full((self.width,), float(index % 7)), "labels": index % CLASSES}

    def read_batch(self) -> float:
        """Seconds of reading a batch of rows, one after another."""
        return timed(lambda: [self[index] for index in range(LOAD_BATCH)])


def measure_loader(options: Any, found: BenchMeasurement) -> None:
    """Steps that take as long as the reading of their rows, read by the training process and by one other.

    Both are a fixed amount of work, not a sleep, so that contention between the processes shows.
    """
    items = ComputedItems(LOAD_BATCH * options.load_batches, options.values)

    def arm(workers: int) -> SessionArm:
        """An arm that has taken two steps, the first of which starts its process."""
        job = job_of(
            options, perceptron_model(16 if found.quick else 1024, classes=CLASSES), items, name="loader",
            threads=max(1, options.thread_count - 1),
            loop={"global_batch_size": LOAD_BATCH, "micro_batch_size": LOAD_BATCH, "log_every": 1},
            scale={"mode": "cpu" if DEVICE.type == "cpu" else "auto"},
        )  # fmt: skip
        job["data"] |= {"storage": "stream", "loader_workers": workers}
        made = SessionArm(job)
        made.run(2)
        return made

    computing = arm(0).run(options.load_batches) / options.load_batches
    items.rounds = trial = 10_000
    items.rounds = max(1, round(trial * computing / items.read_batch()))  # before the processes are forked
    reading = min(items.read_batch() for _ in range(5)) * options.load_batches
    arms = {"0 processes": arm(0), "1 process": arm(1)}
    blocks = {name: partial(one.run, options.load_batches) for name, one in arms.items()}
    times = found.alternate(blocks, blocks=options.blocks, named="data set read in {}")
    for one in arms.values():
        one.session.loader.close()
    found.gate(equal_series("one process reads the same rows", arms["1 process"].losses, arms["0 processes"].losses))
    found.compare(times, of="0 processes", to="1 process", name="0 processes / 1 process that reads")
    hidden = [(a - b) / reading for a, b in zip(times["0 processes"], times["1 process"], strict=True)]
    middle = median_interval(hidden)
    found.values["hidden_share_of_reading"] = {"values": hidden, "reading_s": reading, "computing_s": computing}
    found.claim(
        "one process hides at least 60 % of the reading", HIDDEN.met(middle.median) and middle.low > 0,
        f"{middle:.0%} of {1e3 * reading / options.load_batches:.1f} ms a step, with steps as long as the reading",
    )  # fmt: skip


# ---------------------------------------------------------------- pinned memory

BEFORE, NEVER, ON_THE_WAY = "pinned before", "pageable", "pinned on the way"
#: Copied in one block.
PINNED_BATCHES, PINNED_BYTES = 16, 16 * 2**20
PINNED_CLAIM = "copies out of pinned memory are 1.1 to 1.2 times as fast, or 2 to 3 times: the guide has both"


def measure_pinned(options: Any, found: BenchMeasurement) -> None:
    """Copies of the same batches to a GPU in three ways; without a GPU nothing is timed, and there is no ratio."""
    if not torch.cuda.is_available():
        found.cannot(PINNED_CLAIM, "torch sees no GPU, and on the host nothing is copied")
        return
    draw = torch.Generator().manual_seed(options.seed)
    pageable = [torch.randn(PINNED_BYTES // 4, generator=draw) for _ in range(PINNED_BATCHES)]
    held = [pin(batch) for batch in pageable]
    ways: dict[str, Callable[[], list[Tensor]]] = {
        NEVER: lambda: [to_device(batch, "cuda") for batch in pageable],
        BEFORE: lambda: [to_device(batch, "cuda") for batch in held],
        ON_THE_WAY: lambda: [to_device(pin(batch), "cuda") for batch in pageable],
    }
    for name, way in ways.items():
        same = all(torch.equal(copied.cpu(), batch) for copied, batch in zip(way(), pageable, strict=True))
        found.gate(Check(f"{name}: the copies are equal", same, f"{PINNED_BATCHES} batches, bit for bit"))
    times = found.alternate({name: partial(timed, way) for name, way in ways.items()}, blocks=options.blocks)
    first, second = (found.compare(times, of=NEVER, to=to) for to in (BEFORE, ON_THE_WAY))
    found.claim(PINNED_CLAIM, first.low >= 1.1, f"{first:.2f} times, pinned on the way {second.median:.2f} times")
