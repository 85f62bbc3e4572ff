"""Bench `data`: rows converted once and kept on the device, against converting, cloning and copying them each epoch.

Both arms train the same perceptron on the same JSON annotations in the same order. Conversion, clone, copy, the device
check and the model are timed separately; the sum of these parts must equal the wall time of the arm.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate, compare, equal_series
from jobs.bench.harness.options import BenchOptions

if TYPE_CHECKING:
    import torch

    from jobs.bench.data.data_arms import Seconds

GOAL = Goal(at_least=4.2)
OLD, NEW = "clone and copy", "resident"
#: Largest fraction of an arm's wall time that no part accounts for.
UNACCOUNTED = 0.02


class DataOptions(BenchOptions):
    """Rows converted once and kept on the device, against converting, cloning and copying them in every epoch."""

    MEASURES: ClassVar[str] = (
        "rows converted once and kept on the device, against converting, cloning and copying every epoch"
    )
    QUICK: ClassVar[dict[str, Any]] = {"rows": 64, "batch": 16, "values": 64, "blocks": 2, "epochs": 3}

    blocks: Count = Field(5, description="repetitions that are kept; each trains both arms from the start")
    rows: Count = Field(2048, description="annotations of the dataset")
    batch: Count = Field(128, description="rows of a step")
    values: Count = Field(2048, description="features of an annotation, as JSON text")
    hidden: Count = Field(16, description="width of the trained perceptron")
    epochs: Count = Field(5, description="of each arm")


def run(options: DataOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Train both arms in turn; see `DataOptions`."""
    import torch

    from jobs.bench.harness.sessions import restored_threads

    block = f"seconds of {options.epochs} epochs, preparation included"
    found = BenchMeasurement("data", quick, options.model_dump(), block)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    with restored_threads(options.thread_count):
        _measure(options, found, device, say)
    return found


def _measure(options: DataOptions, found: BenchMeasurement, device: torch.device, say: Say) -> None:
    from jobs.bench.data.data_arms import Annotations, Perceptron, clone_and_copy, order_of, resident

    data = Annotations(options.rows, options.values, seed=options.seed)
    order = order_of(options.rows, options.batch, options.epochs, seed=options.seed)
    spent: dict[str, list[Seconds]] = {OLD: [], NEW: []}
    losses: dict[str, list[float]] = {}
    converted: dict[str, int] = {}

    def block(name: str) -> float:
        model = Perceptron(options.values, options.hidden, seed=options.seed, device=device)
        data.converted, begin = 0, time.perf_counter()
        if name == OLD:
            seconds = clone_and_copy(data, order, model, device=device)
        else:
            seconds = resident(
                data, model, batch=options.batch, epochs=options.epochs, seed=options.seed, device=device
            )
        wall = time.perf_counter() - begin
        spent[name].append(seconds)
        converted[name] = data.converted
        losses[name] = [float(loss) for loss in model.losses]
        return wall

    say(f"{options.blocks} times {options.epochs} epochs of each arm on {device.type}")
    walls = alternate({name: partial(block, name) for name in spent}, blocks=options.blocks)
    kept = {name: seconds[-options.blocks :] for name, seconds in spent.items()}
    found.arms |= walls
    found.gate(equal_series("both arms have the same losses", losses[NEW], losses[OLD]))
    once, each = len(data), len(data) * options.epochs
    detail = f"{converted[NEW]} against {converted[OLD]} conversions of {len(data)} annotations"
    found.gate(Check("converted once, against once an epoch", _converted_once(converted, once, each), detail))
    for name, seconds in kept.items():
        worst = max(abs(wall - one.total) / wall for wall, one in zip(walls[name], seconds, strict=True))
        allowed = UNACCOUNTED if not found.quick else 1.0
        found.gate(Check(f"{name}: the total is the sum of its parts", worst <= allowed, f"within {worst:.2%}"))
    _ratios(found, walls, kept)
    _values(found, kept, say)


def _converted_once(converted: dict[str, int], once: int, each: int) -> bool:
    """The resident arm reads the first item a few more times, to determine its size."""
    return once <= converted[NEW] <= once + 8 and converted[OLD] == each


def _ratios(found: BenchMeasurement, walls: dict[str, list[float]], kept: dict[str, list[Seconds]]) -> None:
    def epoch(number: int, *, prepared: bool) -> dict[str, list[float]]:
        return {
            name: [(one.preparation if prepared else 0.0) + sum(one.epochs[number].values()) for one in seconds]
            for name, seconds in kept.items()
        }

    steady = {n: [sum(sum(e.values()) for e in one.epochs[1:]) for one in s] for n, s in kept.items()}
    conversion = [one.parts()["conversion"] for one in kept[OLD]]
    share = statistics.median(part / wall for part, wall in zip(conversion, walls[OLD], strict=True))
    total = compare(walls, of=OLD, to=NEW, name="five epochs in all" if len(kept[OLD][0].epochs) == 5 else "all epochs",
                    goal=GOAL, share=share)  # fmt: skip
    first = compare(epoch(0, prepared=True), of=OLD, to=NEW, name="first epoch, preparation included")
    found.ratios += [
        total, first, compare(epoch(0, prepared=False), of=OLD, to=NEW, name="first epoch, preparation apart"),
        compare(steady, of=OLD, to=NEW, name="every later epoch"),
    ]  # fmt: skip
    evidence = f"{total:.2f} times; conversion is {share:.0%} of the old path"
    found.claim("rows kept on the device are at least 4.2 times the clone-and-copy path over all epochs",
                bool(total.met), evidence)  # fmt: skip
    later = found.ratios[-1]
    found.claim("2 to 5 times with rows loaded in advance", later.low >= 2, f"{later.median:.2f} times, epoch by epoch")
    pairs = zip(kept[NEW], kept[OLD], strict=True)
    prepared = statistics.median(new.preparation / sum(old.epochs[0].values()) for new, old in pairs)
    found.claim("the preparation is a one-time cost of about one epoch of conversions",
                0.5 < prepared < 1.5, f"{prepared:.2f} of an epoch of the old path")  # fmt: skip


def _values(found: BenchMeasurement, kept: dict[str, list[Seconds]], say: Say) -> None:
    """Add the seconds of each part, and by epoch the fraction of the time that the model computes."""
    from jobs.bench.data.data_arms import PARTS

    parts: dict[str, Any] = {}
    busy: dict[str, list[float]] = {}
    for name, seconds in kept.items():
        medians = {part: statistics.median(one.parts()[part] for one in seconds) for part in ("preparation", *PARTS)}
        parts[name] = {**medians, "total": sum(medians.values())}
        busy[name] = [statistics.median(shares) for shares in zip(*(one.busy() for one in seconds), strict=True)]
    found.values |= {"parts_s": parts, "busy_share_by_epoch": busy}
    low, high = statistics.mean(busy[OLD]), statistics.mean(busy[NEW])
    evidence = f"from {low:.0%} to {high:.0%} of an epoch"
    found.claim("the fraction of time that the model computes rises from 5-20 % to 70-95 %",
                high >= 0.7 and low <= 0.2, evidence)  # fmt: skip
    for name in kept:
        say(f"{name}, seconds: " + ", ".join(f"{part} {value:.3f}" for part, value in parts[name].items()))
