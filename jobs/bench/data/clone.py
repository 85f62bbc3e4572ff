"""Bench `clone`: the cost of three habits: cloning each batch, moving tensors that are already on the device, and
reading the dataset in the training process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import Field

from cluster.config import Count, NonNegative
from cluster.devices.inventory import local_inventory
from jobs.bench.harness.inputs import draw_rows
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate, equal_series, median_interval
from jobs.bench.harness.options import BenchOptions

if TYPE_CHECKING:
    from torch import Tensor

#: Fraction of the reading time that one loader process should hide.
HIDDEN = Goal(at_least=0.6)


class CloneOptions(BenchOptions):
    """The cost of cloning each batch, of redundant moves to the device, and of reading in the training process."""

    MEASURES: ClassVar[str] = (
        "cost of cloning batches, of redundant device moves, and of reading in the training process"
    )
    QUICK: ClassVar[dict[str, Any]] = {
        "rows": 64, "batch": 16, "values": 32, "hidden": 8, "blocks": 2, "block_steps": 4, "load_batches": 4,
        "load_batch": 2, "load_blocks": 2, "calls": 200,
    }  # fmt: skip

    blocks: Count = Field(15, description="repetitions that are kept; each runs one block of every arm")
    rows: Count = Field(4096, description="of the dataset, kept in memory")
    batch: Count = Field(256, description="rows of a step")
    values: Count = Field(2048, description="features of a row")
    hidden: Count = Field(16, description="width of the trained perceptron")
    block_steps: Count = Field(32, description="steps of one block")
    calls: Count = Field(5000, description="moves of one batch in one timed block")
    transform_ms: NonNegative = Field(5.0, description="computation for an item of the loader's dataset")
    load_batch: Count = Field(8, description="rows of a step when loaders are measured")
    load_batches: Count = Field(24, description="steps of one block when loaders are measured")
    load_blocks: Count = Field(11, description="repetitions that are kept when loaders are measured")


def run(options: CloneOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure the three habits one by one; see `CloneOptions`."""
    from jobs.bench.harness.sessions import restored_threads

    found = BenchMeasurement("clone", quick, options.model_dump(), "seconds of one block")
    with restored_threads(options.threads if isinstance(options.threads, int) else max(1, local_inventory().cpus - 1)):
        say("cloned batches, and redundant moves")
        _measure_clones(options, found)
        _measure_moves(options, found)
        say("one loader process")
        _measure_loader(options, found)
    return found


# -- clones ---------------------------------------------------------------------------------------


def _measure_clones(options: CloneOptions, found: BenchMeasurement) -> None:
    """The dataset is larger than the caches, and a small model reads each row about once, so that the first access to
    the rows waits for memory. A clone reads them sequentially and leaves them in the cache for the step (measured on
    one thread: 1.12 ms a step without a clone; with one, 0.12 for the clone and 0.98 for the step). Not cloning is
    therefore not necessarily faster here.
    """
    import torch

    from jobs.bench.data.data_arms import CLASSES, Perceptron
    from raytrain.data.transfer import to_device

    rows = draw_rows(options.rows, options.values, classes=CLASSES, seed=options.seed)
    batches = [{n: column[at : at + options.batch] for n, column in rows.items()}
               for at in range(0, options.rows, options.batch)]  # fmt: skip
    models = {name: Perceptron(options.values, options.hidden, seed=options.seed, device=torch.device("cpu"))
              for name in ("cloned", "not cloned", "always moved")}  # fmt: skip
    ways: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
        "cloned": lambda batch: {name: tensor.clone() for name, tensor in batch.items()},
        "not cloned": lambda batch: to_device(batch, "cpu"),
        "always moved": lambda batch: {name: tensor.to("cpu") for name, tensor in batch.items()},
    }

    def block(name: str) -> float:
        begin = time.perf_counter()
        for number in range(options.block_steps):
            models[name].step(ways[name](batches[number % len(batches)]))
        return time.perf_counter() - begin

    times = alternate({name: partial(block, name) for name in ways}, blocks=options.blocks)
    found.arms |= {f"batches {name}": values for name, values in times.items()}
    losses = {name: [float(loss) for loss in model.losses] for name, model in models.items()}
    for name in ("cloned", "always moved"):
        found.gate(equal_series(f"batches {name}: the losses are unchanged", losses[name], losses["not cloned"]))
    clone = found.compare(times, of="cloned", to="not cloned")
    check = found.compare(times, of="always moved", to="not cloned", name="always moved / device checked first")
    megabytes = options.batch * options.values * 4 / 1e6
    found.claim("batches that are not cloned train 1.2 to 1.3 times as fast", clone.low >= 1.2,
                f"{clone} with a small model and {megabytes:.1f} MB a batch")  # fmt: skip
    found.claim("checking the device before a move makes a step 1.1 to 1.2 times as fast", check.low >= 1.1,
                f"{check}: torch checks it too")  # fmt: skip


def _measure_moves(options: CloneOptions, found: BenchMeasurement) -> None:
    import torch

    from raytrain.data.transfer import to_device

    batch = {name: torch.zeros(options.batch, 4) for name in "abcdefgh"}

    def checked() -> float:
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

    times = alternate({"checked": checked, "moved": moved}, blocks=max(3, options.blocks // 3))
    found.values["microseconds_per_tensor"] = {
        name: 1e6 * median_interval(values).median for name, values in times.items()
    }


# -- the loader -----------------------------------------------------------------------------------


class ComputedItems:
    """A dataset whose items each run `rounds` iterations of a Python loop, which holds the interpreter lock."""

    def __init__(self, rows: int, *, rounds: int) -> None:
        self.rows, self.rounds = rows, rounds

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        from jobs.bench.data.data_arms import CLASSES

        _count(self.rounds)
        return {"x": torch.full((4,), float(index)), "labels": index % CLASSES}


def _count(rounds: int) -> None:
    value = 0.0
    for _ in range(rounds):
        value += 1.0


def _multiply(rounds: int) -> None:
    import torch

    left, right = torch.ones(64, 64), torch.ones(64, 64)
    for _ in range(rounds):
        torch.mm(left, right)


def rounds_for(work: Callable[[int], None], seconds: float) -> int:
    """The number of rounds of `work` that take `seconds` on an idle core (from the fastest of several trials)."""
    trial = 1000
    fastest = math.inf
    for _ in range(20):
        begin = time.perf_counter()
        work(trial)
        fastest = min(fastest, time.perf_counter() - begin)
    return max(1, round(seconds / fastest * trial))


class _BlockSeconds(NamedTuple):
    """Seconds of a block: waiting for the first batch, waiting for the others, and in all steps except the first."""

    first: float
    waiting: float
    stepping: float

    @property
    def steady(self) -> float:
        """Without the wait for the first batch and the first step."""
        return self.waiting + self.stepping


def _measure_loader(options: CloneOptions, found: BenchMeasurement) -> None:
    """A step takes as long as reading its batch, so that with two free cores all reading could be hidden.

    Both are a fixed amount of work, not a sleep, so that contention between the processes shows. The process is started
    once, as in training; its start-up is reported separately, like the first batch of a block, which cannot be hidden.
    """
    import torch

    from raytrain.data.loading.processes import LoaderPool
    from raytrain.data.rows.batches import Cursor, StepBatches
    from raytrain.data.rows.map_style import DatasetSplit
    from raytrain.train.loader import BatchLoader

    seconds = options.transform_ms / 1e3
    items = ComputedItems(options.load_batch * options.load_batches, rounds=rounds_for(_count, seconds))
    split = DatasetSplit(items)
    step = [rounds_for(_multiply, seconds * options.load_batch)]
    seen: dict[str, list[list[float]]] = {"0 processes": [], "1 process": []}
    spent: dict[str, list[_BlockSeconds]] = {name: [] for name in seen}
    begin = time.perf_counter()
    pool = LoaderPool({"train": split}, workers=1, prefetch=2, seed=options.seed)
    started = time.perf_counter() - begin
    loaders = {name: BatchLoader(
        StepBatches(split, seed=options.seed, global_batch_size=options.load_batch, micro_batch=options.load_batch,
                    storage="stream"),
        device=torch.device("cpu"), weight=None, dtype=torch.float32, pool=pool if name == "1 process" else None,
    ) for name in seen}  # fmt: skip

    def block(name: str) -> float:
        loader, cursor, times = loaders[name], Cursor(), [time.perf_counter()]
        for _ in range(options.load_batches):
            indices, cursor = loader.global_batch(cursor)
            for micro in loader.micro_batches(indices):
                times.append(time.perf_counter())
                seen[name].append(micro.batch["x"][:, 0].tolist())
                _multiply(step[0])
                times.append(time.perf_counter())
        if loader._ahead is not None:
            loader._ahead.stop()
        parts = [b - a for a, b in pairwise(times)]
        spent[name].append(_BlockSeconds(parts[0], sum(parts[2::2]), sum(parts[3::2])))
        return spent[name][-1].steady

    block("0 processes")
    alone = spent["0 processes"].pop()
    step[0] = max(1, round(step[0] * alone.waiting / alone.stepping))  # calibrated inside the loop
    seen["0 processes"].clear()
    times = alternate({name: partial(block, name) for name in seen}, blocks=options.load_blocks)
    for loader in loaders.values():
        loader.close()
    same = seen["0 processes"] == seen["1 process"]
    found.gate(Check("one process reads the rows in the same order", same, f"{len(seen['1 process'])} batches"))
    found.arms |= {f"data set read in {name}": values for name, values in times.items()}
    _add_hidden(found, options, {name: values[-options.load_blocks :] for name, values in spent.items()}, started)
    found.compare(times, of="0 processes", to="1 process", name="0 processes / 1 process that reads")


def _add_hidden(
    found: BenchMeasurement, options: CloneOptions, kept: dict[str, list[_BlockSeconds]], started: float
) -> None:
    """Add the fraction of the reading time that one process hides."""
    pairs = list(zip(kept["0 processes"], kept["1 process"], strict=True))
    hidden = [(a.steady - b.steady) / a.waiting for a, b in pairs]
    middle = median_interval(hidden)
    found.values["hidden_share_of_reading"] = {
        "values": hidden, "median": middle.median, "process_start_s": started,
        "seconds_of_blocks": {name: [one._asdict() for one in values] for name, values in kept.items()},
        "share_no_longer_waited_for": median_interval([1 - b.waiting / a.waiting for a, b in pairs]).median,
        "steps_longer_by": median_interval([b.stepping / a.stepping - 1 for a, b in pairs]).median,
    }  # fmt: skip
    found.claim("one process hides at least 60 % of the reading", HIDDEN.met(middle.median) and middle.low > 0,
                f"{middle:.0%} of {options.transform_ms:g} ms an item, with steps as long as the reading")  # fmt: skip
