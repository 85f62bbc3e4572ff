"""Bench `clone`: three habits and what they cost: a clone of each batch, a move of what is in place, and reading the
data set in the training process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cluster.inventory import local_inventory
from jobs.bench.data_arms import CLASSES, Perceptron
from jobs.bench.data_options import CloneOptions
from jobs.bench.measuring import Check, Goal, Measurement, Say, alternate, compare, equal_series, median_interval
from raytrain.data.batches import Cursor, StepBatches
from raytrain.data.dataset import DatasetSplit
from raytrain.data.loader import LoaderPool
from raytrain.data.transfer import to_device
from raytrain.feed import Feed

#: Part of the time of reading that one process should hide.
HIDDEN = Goal(at_least=0.6)


def run(options: CloneOptions, *, quick: bool, say: Say) -> Measurement:
    """Measure the three apart; see `CloneOptions`."""
    found = Measurement("clone", quick, options.model_dump(), "seconds of one block")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads if isinstance(options.threads, int) else max(1, local_inventory().cpus - 1))
    try:
        say("a clone of each batch, and a move of what is in place")
        _clones(options, found)
        _moves(options, found)
        say("one process that reads beside training")
        _loader(options, found)
    finally:
        torch.set_num_threads(before)
    return found


# -- clones ---------------------------------------------------------------------------------------


def _clones(options: CloneOptions, found: Measurement) -> None:
    draw = torch.Generator().manual_seed(options.seed)
    rows = {
        "x": torch.randn(options.rows, options.values, generator=draw),
        "labels": torch.randint(CLASSES, (options.rows,), generator=draw),
    }
    batches = [{n: column[at : at + options.batch] for n, column in rows.items()}
               for at in range(0, options.rows, options.batch)]  # fmt: skip
    models = {name: Perceptron(options.values, options.hidden, seed=options.seed, device=torch.device("cpu"))
              for name in ("cloned", "as they are", "always moved")}  # fmt: skip
    ways: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
        "cloned": lambda batch: {name: tensor.clone() for name, tensor in batch.items()},
        "as they are": lambda batch: to_device(batch, "cpu"),
        "always moved": lambda batch: {name: tensor.to("cpu") for name, tensor in batch.items()},
    }

    def block(name: str) -> float:
        begin = time.perf_counter()
        for number in range(options.block_steps):
            models[name].step(ways[name](batches[number % len(batches)]))
        return time.perf_counter() - begin

    times = alternate({name: (lambda name=name: block(name)) for name in ways}, blocks=options.blocks)
    found.arms |= {f"batches {name}": values for name, values in times.items()}
    losses = {name: [float(loss) for loss in model.losses] for name, model in models.items()}
    for name in ("cloned", "always moved"):
        found.gate(equal_series(f"batches {name} give the losses of batches as they are", losses[name],
                                losses["as they are"]))  # fmt: skip
    clone = compare(times, of="cloned", to="as they are", name="cloned / as they are")
    check = compare(times, of="always moved", to="as they are", name="always moved / looked at first")
    found.ratios += [clone, check]
    megabytes = options.batch * options.values * 4 / 1e6
    found.claim("batches that are not cloned train 1.2 to 1.3 times as fast", clone.low >= 1.2,
                f"{clone.median:.3f} [{clone.low:.3f}, {clone.high:.3f}] with a light model and {megabytes:.1f} MB "
                "a batch")  # fmt: skip
    found.claim("looking before a move makes a step 1.1 to 1.2 times as fast", check.low >= 1.1,
                f"{check.median:.3f} [{check.low:.3f}, {check.high:.3f}]: torch looks itself")  # fmt: skip


def _moves(options: CloneOptions, found: Measurement) -> None:
    batch = {name: torch.zeros(options.batch, 4) for name in "abcdefgh"}

    def looked() -> float:
        begin = time.perf_counter()
        for _ in range(options.calls):
            to_device(batch, "cpu")
        return (time.perf_counter() - begin) / options.calls / len(batch)

    def moved() -> float:
        begin = time.perf_counter()
        for _ in range(options.calls):
            for tensor in batch.values():
                tensor.to("cpu")
        return (time.perf_counter() - begin) / options.calls / len(batch)

    times = alternate({"looked at": looked, "moved": moved}, blocks=max(3, options.blocks // 3))
    found.values["microseconds_per_tensor"] = {
        name: 1e6 * median_interval(values).median for name, values in times.items()
    }


# -- the loader -----------------------------------------------------------------------------------


class Worked:
    """A dataset whose items take `seconds` of a core each."""

    def __init__(self, rows: int, *, seconds: float) -> None:
        self.rows, self.seconds = rows, seconds

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        end = time.perf_counter() + self.seconds
        value = 0.0
        while time.perf_counter() < end:
            value += 1.0
        return {"x": torch.full((4,), float(index)), "labels": index % CLASSES}


def _loader(options: CloneOptions, found: Measurement) -> None:
    seconds = options.transform_ms / 1e3
    rows = options.load_batch * options.load_batches
    split = DatasetSplit(Worked(rows, seconds=seconds))
    work = seconds * options.load_batch  # the step takes as long as the reading of its batch
    seen: dict[str, list[list[float]]] = {"0 processes": [], "1 process": []}

    def block(name: str) -> float:
        batches = StepBatches(split, seed=options.seed, global_batch=options.load_batch,
                              micro_batch=options.load_batch, storage="stream")  # fmt: skip
        ours = name == "1 process"
        pool = LoaderPool({"train": split}, workers=1, prefetch=2, seed=options.seed) if ours else None
        feed = Feed(batches, device=torch.device("cpu"), weight=None, dtype=torch.float32, pool=pool)
        begin, cursor = time.perf_counter(), Cursor()
        while cursor.epoch == 0:
            handles, cursor = feed.window(cursor)
            for micro in feed.micro_batches(handles):
                seen[name].append(micro.batch["x"][:, 0].tolist())
                end = time.perf_counter() + work
                while time.perf_counter() < end:
                    torch.ones(64, 64).matmul(torch.ones(64, 64))
        wall = time.perf_counter() - begin
        feed.close()
        return wall

    times = alternate({name: (lambda name=name: block(name)) for name in seen}, blocks=max(3, options.blocks // 3))
    same = seen["0 processes"] == seen["1 process"]
    found.gate(Check("one process reads the rows in the same order", same, f"{len(seen['1 process'])} batches"))
    found.arms |= {f"data set read in {name}": values for name, values in times.items()}
    reading = seconds * rows
    hidden = [(a - b) / reading for a, b in zip(times["0 processes"], times["1 process"], strict=True)]
    middle = median_interval(hidden)
    found.values["hidden_share_of_reading"] = {"values": hidden, "median": middle.median}
    found.ratios.append(compare(times, of="0 processes", to="1 process", name="0 processes / 1 process that reads"))
    found.claim("one process hides at least 60 % of the reading", HIDDEN.met(middle.median) and middle.low > 0,
                f"{middle.median:.0%} [{middle.low:.0%}, {middle.high:.0%}] of {options.transform_ms:g} ms an item, "
                "with steps as long as their reading")  # fmt: skip
