"""Bench `tune`: result and cost of the search for batch size and precision, against a grid and against doubling.

It uses a wide and a narrow GPT. The grid times every size in every precision. Doubling runs 3 training steps and 3
validation batches of each size from 2 to the largest, in fp32 only. Our search also measures memory, confirms a peak,
runs the numeric gate, and compares its winner with the other candidates again, in alternation. All run in turn in this
process, after a warm-up of all kernels, without the overhead of Ray.

A ceiling is a memory budget half-way between the measured peaks of two neighbouring sizes. It is meaningful only if
that distance exceeds the difference between two readings of one peak, which is reported too; for the narrow GPT, 4 and
8 rows differ by 1 % of the process. Throughput saturates with the size: any size up to the fastest that fits counts as
right if its throughput is within `NEAR` of it.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from cluster.config import Count
from cluster.devices.inventory import local_inventory
from jobs.bench.harness.inputs import draw_tokens, gpt_model, job_of
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate, matrix_units
from jobs.bench.harness.options import BenchOptions
from raytrain.autotune.batch_space import BatchSpace, sizes_free
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.precision import WORTHWHILE_GAIN
from raytrain.autotune.size_curve import MOST_SIZES, NEAR
from raytrain.errors import InputError

if TYPE_CHECKING:
    from jobs.bench.tune_arms import FinishedSearch, SearchedModel

MIB = 2**20
VOCABULARY = 256
#: Goals of the search.
OF_THE_BEST, OF_THE_GRIDS_TIME, OF_DOUBLINGS_TIME = 0.95, 0.25, 0.4


class TuneOptions(BenchOptions):
    """The search for batch size and precision, against an exhaustive grid and against doubling until failure."""

    QUICK: ClassVar[dict[str, Any]] = {
        "wide": 32, "narrow": 16, "context": 16, "rows": 16, "repeats": 2, "blocks": 2, "gate_steps": 2,
        "block_s": 0.0, "ceilings": [2],
    }  # fmt: skip

    blocks: Count = Field(15, description="repetitions of the chosen point against the grid's best")
    repeats: Count = Field(3, description="runs of each kind of search, in turn")
    wide: Count = Field(256, description="width of one GPT of two layers")
    narrow: Count = Field(64, description="width of the other")
    context: Count = Field(64, description="tokens of a window of both")
    rows: Count = Field(256, description="rows of a step, and the largest micro-batch; a power of two")
    free: bool = Field(False, description="a step has one micro-batch, and its batch size is searched")
    gate_steps: Count = Field(20, description="steps of the numeric gate")
    block_s: float = Field(0.25, ge=0, description="seconds that one block of the chosen point should take")
    ceilings: list[Count] = Field([4, 8, 32], description="micro-batch sizes that just fit in the injected budgets")


@dataclass
class _ModelResults:
    """All results for one model."""

    name: str
    width: int
    searched: SearchedModel
    searches: list[FinishedSearch] = field(default_factory=list)
    alone: list[FinishedSearch] = field(default_factory=list)
    grids: list[list[Measurement]] = field(default_factory=list)

    def grid_scores(self) -> dict[Candidate, float]:
        """Rows per second of every point, the median over all its passes in all repetitions."""
        from jobs.bench.tune_arms import PRECISIONS

        passes: dict[Candidate, tuple[list[float], list[float]]] = {}
        for one in (one for grid in self.grids for one in grid if one.outcome == "ok"):
            times, updates = passes.setdefault(one.candidate, ([], []))
            times += one.pass_s
            updates += one.update_s
        space = self.searched.space(PRECISIONS, budget=None)
        return {point: _score(space, point, *both) for point, both in passes.items()}


def _score(space: BatchSpace, point: Candidate, times: list[float], updates: list[float]) -> float:
    return space.score(point.micro_batch_size, statistics.median(times), updates)


def run(options: TuneOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure the wide and the narrow model, then the injected ceilings; see `TuneOptions`.

    Raises:
        InputError: rows that are not a power of two.
    """
    from jobs.bench.harness.sessions import restored_threads

    if options.rows & (options.rows - 1):
        raise InputError("rows", got=str(options.rows), expected="a power of two")
    found = BenchMeasurement("tune", quick, options.model_dump(), "seconds of one search, or of one row of training")
    found.values["matrix_units"] = matrix_units(local_inventory().cpu_flags)
    with restored_threads():
        wide = _measure_model(found, options, options.wide, say)
        narrow = _measure_model(found, options, options.narrow, say)
        ceilings = _measure_ceilings(found, options, narrow, say)
    _claims(found, [wide, narrow], ceilings)
    return found


def _gpt_job(options: TuneOptions, *, width: int, size: int) -> dict[str, Any]:
    """A GPT of two layers on random tokens, in micro-batches of `size` rows."""
    data = draw_tokens(options.rows, options.context, vocabulary=VOCABULARY, seed=options.seed)
    model = gpt_model(options, layers=2, width=width, vocab_size=VOCABULARY)
    batch = size if options.free else options.rows
    loop = {"global_batch_size": batch, "micro_batch_size": size, "log_every": 0}
    return job_of(
        options, model, data, name="tune", loop=loop, threads=options.thread_count, precision={"dtype": "fp32"}
    )


def _measure_model(found: BenchMeasurement, options: TuneOptions, width: int, say: Say) -> _ModelResults:
    from jobs.bench.tune_arms import PRECISIONS, SearchedModel

    job = _gpt_job(options, width=width, size=options.rows)
    searched = SearchedModel(job, sizes_free(options.rows, 1), options.gate_steps, options.free)
    name = f"gpt {width}"
    model = _ModelResults(name, width, searched)
    before, budget = _hash(searched), searched.budget()
    say(f"{name}: {len(searched.sizes)} sizes in {' and '.join(PRECISIONS)}")
    searched.warm_up()

    def grid() -> float:
        measured, seconds = searched.grid()
        model.grids.append(measured)
        return seconds

    def search() -> float:
        model.searches.append(searched.search(budget=budget))
        return model.searches[-1].seconds

    def alone() -> float:
        model.alone.append(searched.search(("fp32",), budget=budget))
        return model.alone[-1].seconds

    arms = {"grid": grid, "search": search, "search, fp32 alone": alone, "doubling": searched.doubling}
    times = alternate(arms, blocks=options.repeats, dropped=0)
    found.arms |= {f"{name}, {arm}": values for arm, values in times.items()}
    unchanged = before == _hash(searched)
    found.gate(Check(f"{name}: the searches do not change the weights", unchanged, "hash of the parameters"))
    found.compare(times, of="search", to="grid", name=f"{name}: time of the search / of the grid",
                  goal=Goal(at_most=OF_THE_GRIDS_TIME))  # fmt: skip
    label = f"{name}: time of the search in fp32 / of doubling"
    found.compare(times, of="search, fp32 alone", to="doubling", name=label, goal=Goal(at_most=OF_DOUBLINGS_TIME))
    _compare_with_best(found, options, model, say)
    return model


def _hash(searched: SearchedModel) -> str:
    total = hashlib.sha256()
    for parameter in searched.session.trainable.module.parameters():
        total.update(parameter.detach().cpu().numpy().tobytes())
    return total.hexdigest()


def _compare_with_best(found: BenchMeasurement, options: TuneOptions, model: _ModelResults, say: Say) -> None:
    """Train at the chosen point and at the grid's best, in turn; a value is the seconds per row."""
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
    found.compare(times, of=theirs, to=ours, name=f"{model.name}: throughput at the choice / at the grid's best",
                  goal=Goal(at_least=OF_THE_BEST))  # fmt: skip
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
    """A block of training steps at one point; returns the seconds per row."""
    from jobs.bench.harness.sessions import SessionArm

    arm = SessionArm(_gpt_job(options, width=width, size=point.micro_batch_size), precision=point.precision)
    rows = arm.session.loader.batches.global_batch_size
    arm.run(1)
    steps = max(1, min(1000, round(options.block_s / arm.run(1))))
    return lambda: arm.run(steps) / (steps * rows)


# -- ceilings -------------------------------------------------------------------------------------


def _measure_ceilings(
    found: BenchMeasurement, options: TuneOptions, model: _ModelResults, say: Say
) -> list[dict[str, Any]]:
    """Search within budgets that given sizes just fit in; fp32, the narrow model."""
    searched, ceilings = model.searched, []
    peaks, again, scores = searched.peaks(), searched.peaks(), model.grid_scores()
    for rows in options.ceilings:
        if rows not in searched.sizes[:-1]:
            expected = f"a power of two below {searched.sizes[-1]}"
            raise InputError("ceilings", got=str(rows), expected=expected)
        following = searched.sizes[searched.sizes.index(rows) + 1]
        budget = (peaks[rows] + peaks[following]) // 2
        one = searched.search(("fp32",), budget=budget)
        speeds = {size: scores[Candidate("fp32", size)] for size in searched.sizes if peaks[size] <= budget}
        best = max(speeds, key=lambda size: speeds[size])
        right = [size for size in speeds if size <= best and speeds[size] >= (1 - NEAR) * speeds[best]]
        chosen = one.decision.candidate.micro_batch_size
        row = {
            "budget": budget, "fits": rows, "best_that_fits": best, "near_the_best": right, "chosen": chosen,
            "steps_apart": min(abs(searched.sizes.index(size) - searched.sizes.index(chosen)) for size in right),
            "readings_differ": max(abs(peaks[size] - again[size]) for size in (rows, following)),
            "half_way": budget - peaks[rows],
            "predicted_peak": one.decision.predicted_peak, "measured_peak": one.decision.measured_peak,
            "out_of_memory": [
                each.candidate.micro_batch_size for each in one.results.measurements if each.outcome == "out_of_memory"
            ],
        }  # fmt: skip
        say(f"{model.name}: {rows} rows just fit; chose {chosen}, near the best that fits are {right}")
        ceilings.append(row)
    found.values["ceilings"], found.values["peaks"] = ceilings, [peaks, again]
    return ceilings


# -- what follows ---------------------------------------------------------------------------------


def _claims(found: BenchMeasurement, models: list[_ModelResults], ceilings: list[dict[str, Any]]) -> None:
    ratios = {ratio.name: ratio for ratio in found.ratios}
    for model in models:
        rate = ratios[f"{model.name}: throughput at the choice / at the grid's best"]
        cost = ratios[f"{model.name}: time of the search / of the grid"]
        double = ratios[f"{model.name}: time of the search in fp32 / of doubling"]
        sizes = max(one.most_sizes for one in model.searches)
        found.claim(
            f"{model.name}: at least {OF_THE_BEST} of the grid's best in at most {OF_THE_GRIDS_TIME} of its time",
            rate.median >= OF_THE_BEST and cost.median <= OF_THE_GRIDS_TIME,
            f"{rate} in {cost}; chose {', '.join(_named(one.decision.candidate) for one in model.searches)}",
        )
        found.claim(
            f"{model.name}: at most {MOST_SIZES} sizes of a precision, {OF_DOUBLINGS_TIME} of doubling's time",
            sizes <= MOST_SIZES and double.median <= OF_DOUBLINGS_TIME,
            f"{sizes} sizes, {double}",
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
        "under an injected ceiling the choice is at most one size away, and no process dies",
        all(row["steps_apart"] <= 1 and row["chosen"] <= row["fits"] for row in ceilings),
        "; ".join(
            f"{row['fits']} rows fit: {row['chosen']}, right {row['near_the_best']}; {row['half_way'] / MIB:.1f} MiB"
            f" from the peaks, readings {row['readings_differ'] / MIB:.1f} MiB apart"
            for row in ceilings
        ),
    )


def _grid_gain(model: _ModelResults) -> float:
    from jobs.bench.tune_arms import PRECISIONS

    scores = model.grid_scores()
    best = {name: max(score for point, score in scores.items() if point.precision == name) for name in PRECISIONS}
    return best["bf16"] / best["fp32"]
