"""Bench `tune`: what the search for batch size and precision finds, and what it costs, against two other ways.

A wide GPT and a narrow one. The grid times every size in every precision. Doubling takes fp32 alone through 3 steps and
3 validation batches of each size from 2 to the largest. Ours reads memory, confirms a peak and runs the numeric gate
besides, and measures its winner once more in turn with the others. All run in this process, in turns, with every kernel
warm; what Ray would add to ours is not in it.

A ceiling is a budget half-way between the peaks of two neighbouring sizes, by brute force. It means something where
that is further from both than two readings of one peak are from each other, which is told beside it; of the narrow GPT,
4 and 8 rows differ by 1 % of the process. Throughput is flat from some size on: any size between the smallest that the
rule may take, `NEAR` the best that fits, and that best itself answers a ceiling.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from cluster.devices.inventory import local_inventory
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate, compare, matrix_units
from jobs.bench.harness.options import TuneOptions
from jobs.bench.harness.sessions import SessionArm
from jobs.bench.search.tune_arms import PRECISIONS, Bench, Found, gpt_job
from raytrain.autotune.search.measurement import Candidate
from raytrain.autotune.search.measurement import Measurement as Measured
from raytrain.autotune.search.precision import WORTHWHILE_GAIN
from raytrain.autotune.search.space import MOST_SIZES, MOST_STEPS, BatchSpace, sizes_free
from raytrain.autotune.search.throughput import NEAR
from raytrain.errors import InputError

MIB = 2**20
#: Goals of issue 5.
OF_THE_BEST, OF_THE_GRIDS_TIME, OF_DOUBLINGS_TIME = 0.95, 0.25, 0.4


@dataclass
class _Model:
    """Everything that is found out about one model."""

    name: str
    width: int
    bench: Bench
    searches: list[Found] = field(default_factory=list)
    alone: list[Found] = field(default_factory=list)
    grids: list[list[Measured]] = field(default_factory=list)

    def grid_scores(self) -> dict[Candidate, float]:
        """Rows per second of every point, the median over all its passes in all repetitions."""
        passes: dict[Candidate, tuple[list[float], list[float]]] = {}
        for one in (one for grid in self.grids for one in grid if one.outcome == "ok"):
            times, updates = passes.setdefault(one.candidate, ([], []))
            times += one.pass_s
            updates += one.update_s
        space = self.bench.space(PRECISIONS, budget=None)
        return {point: _score(space, point, *both) for point, both in passes.items()}


def _score(space: BatchSpace, point: Candidate, times: list[float], updates: list[float]) -> float:
    return space.score(point.micro_batch_size, statistics.median(times), statistics.median(updates))


def run(options: TuneOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure the wide model and the narrow one, then the injected ceilings; see `TuneOptions`.

    Raises:
        InputError: rows that are no power of two.
    """
    if options.rows & (options.rows - 1):
        raise InputError("rows", seen=str(options.rows), expected="a power of two")
    found = BenchMeasurement("tune", quick, options.model_dump(), "seconds of one search, or of one row of training")
    found.values["matrix_units"] = matrix_units(local_inventory().cpu_flags)
    threads = torch.get_num_threads()
    try:
        wide = _model(found, options, options.wide, say)
        narrow = _model(found, options, options.narrow, say)
        ceilings = _ceilings(found, options, narrow, say)
    finally:
        torch.set_num_threads(threads)
    _claims(found, [wide, narrow], ceilings)
    return found


def _model(found: BenchMeasurement, options: TuneOptions, width: int, say: Say) -> _Model:
    job = gpt_job(options, width=width, size=options.rows)
    bench = Bench(job, sizes_free(options.rows, 1), options.gate_steps, options.free)
    name = f"gpt {width}"
    model = _Model(name, width, bench)
    before, budget = _hash(bench), bench.budget()
    say(f"{name}: {len(bench.sizes)} sizes in {' and '.join(PRECISIONS)}")
    bench.warm_up()

    def grid() -> float:
        measured, seconds = bench.grid()
        model.grids.append(measured)
        return seconds

    def search() -> float:
        model.searches.append(bench.search(budget=budget))
        return model.searches[-1].seconds

    def alone() -> float:
        model.alone.append(bench.search(("fp32",), budget=budget))
        return model.alone[-1].seconds

    arms = {"grid": grid, "search": search, "search, fp32 alone": alone, "doubling": bench.doubling}
    times = alternate(arms, blocks=options.repeats, dropped=0)
    found.arms |= {f"{name}, {arm}": values for arm, values in times.items()}
    found.gate(Check(f"{name}: weights are as before the searches", before == _hash(bench), "hash of the parameters"))
    found.ratios += [
        compare(times, of="search", to="grid", name=f"{name}: time of the search / of the grid",
                goal=Goal(at_most=OF_THE_GRIDS_TIME)),
        compare(times, of="search, fp32 alone", to="doubling", name=f"{name}: time of the search in fp32 / of doubling",
                goal=Goal(at_most=OF_DOUBLINGS_TIME)),
    ]  # fmt: skip
    _against_the_best(found, options, model, say)
    return model


def _hash(bench: Bench) -> str:
    total = hashlib.sha256()
    for parameter in bench.session.trainable.module.parameters():
        total.update(parameter.detach().cpu().numpy().tobytes())
    return total.hexdigest()


def _against_the_best(found: BenchMeasurement, options: TuneOptions, model: _Model, say: Say) -> None:
    """Train at the chosen point and at the grid's best, in turn: the seconds of a row."""
    scores = model.grid_scores()
    best = max(scores, key=lambda point: scores[point])
    chosen = model.searches[0].decision.candidate
    say(f"{model.name}: chose {_named(chosen)}; the grid's best is {_named(best)}")
    arms = {
        f"at {role}, {_named(point)}": _training(options, model.width, point)
        for role, point in (("the chosen point", chosen), ("the grid's best", best))
    }
    times = alternate(arms, blocks=options.blocks)
    found.arms |= {f"{model.name}, {arm}": values for arm, values in times.items()}
    ours, theirs = arms
    found.ratios.append(
        compare(times, of=theirs, to=ours, name=f"{model.name}: throughput at the choice / at the grid's best",
                goal=Goal(at_least=OF_THE_BEST))
    )  # fmt: skip
    found.values[model.name] = {
        "chosen": [_named(one.decision.candidate) for one in model.searches],
        "fp32_alone": [_named(one.decision.candidate) for one in model.alone],
        "grid_best": _named(best),
        "grid_rows_per_s": {_named(point): score for point, score in scores.items()},
        "searches": [one.to_json() for one in model.searches],
    }


def _named(point: Candidate) -> str:
    return f"{point.precision} x {point.micro_batch_size}"


def _training(options: TuneOptions, width: int, point: Candidate) -> Callable[[], float]:
    """A block of real training steps at one point; returns the seconds of a row."""
    arm = SessionArm(gpt_job(options, width=width, size=point.micro_batch_size), precision=point.precision)
    rows = arm.session.loader.batches.global_batch_size
    arm.run(1)
    steps = max(1, min(1000, round(options.block_s / arm.run(1))))
    return lambda: arm.run(steps) / (steps * rows)


# -- ceilings -------------------------------------------------------------------------------------


def _ceilings(found: BenchMeasurement, options: TuneOptions, model: _Model, say: Say) -> list[dict[str, Any]]:
    """A budget that so many rows just fit into, and what the search makes of it; fp32, the narrow model."""
    bench, told = model.bench, []
    peaks, again, scores = bench.peaks(), bench.peaks(), model.grid_scores()
    for rows in options.ceilings:
        if rows not in bench.sizes[:-1]:
            expected = f"a power of two below {bench.sizes[-1]}"
            raise InputError("ceilings", seen=str(rows), expected=expected)
        following = bench.sizes[bench.sizes.index(rows) + 1]
        budget = (peaks[rows] + peaks[following]) // 2
        one = bench.search(("fp32",), budget=budget)
        speeds = {size: scores[Candidate("fp32", size)] for size in bench.sizes if peaks[size] <= budget}
        best = max(speeds, key=lambda size: speeds[size])
        right = [size for size in speeds if size <= best and speeds[size] >= (1 - NEAR) * speeds[best]]
        chosen = one.decision.candidate.micro_batch_size
        row = {
            "budget": budget, "fits": rows, "best_that_fits": best, "near_the_best": right, "chosen": chosen,
            "steps_apart": min(abs(bench.sizes.index(size) - bench.sizes.index(chosen)) for size in right),
            "readings_differ": max(abs(peaks[size] - again[size]) for size in (rows, following)),
            "half_way": budget - peaks[rows],
            "predicted_peak": one.decision.predicted_peak, "measured_peak": one.decision.measured_peak,
            "out_of_memory": [m.candidate.micro_batch_size for m in one.measurements if m.outcome == "out_of_memory"],
        }  # fmt: skip
        say(f"{model.name}: {rows} rows just fit; chose {chosen}, near the best that fits are {right}")
        told.append(row)
    found.values["ceilings"], found.values["peaks"] = told, [peaks, again]
    return told


# -- what follows ---------------------------------------------------------------------------------


def _claims(found: BenchMeasurement, models: list[_Model], ceilings: list[dict[str, Any]]) -> None:
    ratios = {ratio.name: ratio for ratio in found.ratios}
    for model in models:
        rate = ratios[f"{model.name}: throughput at the choice / at the grid's best"]
        cost = ratios[f"{model.name}: time of the search / of the grid"]
        double = ratios[f"{model.name}: time of the search in fp32 / of doubling"]
        sizes, steps = (max(column) for column in zip(*(one.largest_effort for one in model.searches), strict=True))
        found.claim(
            f"{model.name}: at least {OF_THE_BEST} of the grid's best in at most {OF_THE_GRIDS_TIME} of its time",
            rate.median >= OF_THE_BEST and cost.median <= OF_THE_GRIDS_TIME,
            f"{rate.median:.3f} [{rate.low:.3f}, {rate.high:.3f}] in {cost.median:.3f} [{cost.low:.3f}, "
            f"{cost.high:.3f}]; chose {', '.join(_named(one.decision.candidate) for one in model.searches)}",
        )
        found.claim(
            f"{model.name}: at most {MOST_SIZES} sizes, {MOST_STEPS} steps of a precision, {OF_DOUBLINGS_TIME} of "
            "doubling's time",
            sizes <= MOST_SIZES and steps <= MOST_STEPS and double.median <= OF_DOUBLINGS_TIME,
            f"{sizes} sizes, {steps} steps, {double.median:.3f} [{double.low:.3f}, {double.high:.3f}]",
        )
        gain = _grid_gain(model)
        wanted = "bf16" if gain > 1 + WORTHWHILE_GAIN else "fp32"
        chose = [one.decision.candidate.precision for one in model.searches]
        tie = abs(gain / (1 + WORTHWHILE_GAIN) - 1) < WORTHWHILE_GAIN
        found.claim(
            f"{model.name}: the precision is the grid's",
            tie or all(one == wanted for one in chose),
            f"chose {', '.join(chose)}; bf16's best is {gain:.2f} times fp32's in the grid",
        )
    found.claim(
        "an injected ceiling is answered within one size, and no process dies of it",
        all(row["steps_apart"] <= 1 and row["chosen"] <= row["fits"] for row in ceilings),
        "; ".join(
            f"{row['fits']} rows fit: {row['chosen']}, right {row['near_the_best']}; {row['half_way'] / MIB:.1f} MiB"
            f" from the peaks, readings {row['readings_differ'] / MIB:.1f} MiB apart"
            for row in ceilings
        ),
    )


def _grid_gain(model: _Model) -> float:
    scores = model.grid_scores()
    best = {name: max(score for point, score in scores.items() if point.precision == name) for name in PRECISIONS}
    return best["bf16"] / best["fp32"]
