"""Bench `tune`: result and cost of the search for batch size and precision, against a grid and against doubling.

It uses a wide and a narrow GPT. The grid times every size in every precision. Doubling runs 3 training steps and 3
validation batches of each size from 2 to the largest, in fp32 only. Our search also measures memory, confirms a peak,
and compares its winner with the other candidates again, in alternation. All run in turn in this process, after a
warm-up of all kernels, without the overhead of Ray.

A ceiling is a memory budget half-way between the measured peaks of two neighbouring sizes. It is meaningful only if
that distance exceeds the difference between two readings of one peak, which is reported too; for the narrow GPT, 4 and
8 rows differ by 1 % of the process. Throughput saturates with the size: any size up to the fastest that fits counts as
right if its throughput is within `NEAR` of it.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field

from cluster.config import Count
from cluster.devices.inventory import local_inventory
from jobs.bench.harness.inputs import gpt_model, job_of
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate, matrix_units
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.sessions import SessionArm, restored_threads, timed
from jobs.driver.local_session import session_of
from raytrain.autotune.batch_search import PASSES, BatchDecision, Proposal, SearchResults, decide, next_proposals
from raytrain.autotune.measurement import WORTHWHILE_GAIN, Candidate, Measurement
from raytrain.autotune.micro_batch import memory_budget
from raytrain.autotune.rounds import preserve_model, preserve_optimizers
from raytrain.autotune.size_curve import MOST_SIZES, NEAR, BatchSpace, sizes_free
from raytrain.autotune.step_probe import StepProbe
from raytrain.errors import InputError

MIB = 2**20
VOCABULARY = 256
PRECISIONS = ("fp32", "bf16")
#: Training steps, and validation batches, of each size, as in Lightning's tuner.
DOUBLING_STEPS = 3
#: Goals of the search.
OF_THE_BEST, OF_THE_GRIDS_TIME, OF_DOUBLINGS_TIME = 0.95, 0.25, 0.4


class TuneOptions(BenchOptions):
    """Options of bench `tune`."""

    QUICK: ClassVar[dict[str, Any]] = {
        "wide": 32, "narrow": 16, "context": 16, "rows": 16, "repeats": 2, "blocks": 2, "block_s": 0.0,
        "ceilings": [2],
    }  # fmt: skip

    blocks: Count = Field(15, description="repetitions of the chosen point against the grid's best")
    repeats: Count = Field(3, description="runs of each kind of search, in turn")
    wide: Count = Field(256, description="width of one GPT of two layers")
    narrow: Count = Field(64, description="width of the other")
    context: Count = Field(64, description="tokens of a window of both")
    rows: Count = Field(256, description="rows of a step, and the largest micro-batch; a power of two")
    free: bool = Field(False, description="a step has one micro-batch, and its batch size is searched")
    block_s: float = Field(0.25, ge=0, description="seconds that one block of the chosen point should take")
    ceilings: list[Count] = Field([4, 8, 32], description="micro-batch sizes that just fit in the injected budgets")


def run(options: TuneOptions, found: BenchMeasurement, say: Say) -> None:
    """Measure the wide and the narrow model, then the injected ceilings; see `TuneOptions`.

    Raises:
        InputError: rows that are not a power of two, or a ceiling at a size that is not searched.
    """
    if options.rows & (options.rows - 1):
        raise InputError("rows", got=str(options.rows), expected="a power of two")
    smaller = sizes_free(options.rows, 1)[:-1]
    for rows in options.ceilings:
        if rows not in smaller:
            raise InputError("ceilings", got=str(rows), expected=f"a power of two below {options.rows}")
    found.block = "seconds of one search, or of one row of training"
    found.values["matrix_units"] = matrix_units(local_inventory().cpu_flags)
    with restored_threads():
        models = [_measure_model(found, options, width, say) for width in (options.wide, options.narrow)]
        ceilings = _measure_ceilings(found, options, models[-1], say)
    for model in models:
        _claim_goals(found, model)
    found.claim(
        "under an injected ceiling the choice is at most one size away, and no process dies",
        all(row["steps_apart"] <= 1 and row["chosen"] <= row["fits"] for row in ceilings),
        "; ".join(
            f"{row['fits']} rows fit: {row['chosen']}, right {row['near_the_best']}; {row['half_way'] / MIB:.1f} MiB"
            f" from the peaks, readings {row['readings_differ'] / MIB:.1f} MiB apart"
            for row in ceilings
        ),
    )


# ---------------------------------------------------------------- the searches


@dataclass(frozen=True)
class FinishedSearch:
    """A finished search of ours: its decision, its measurements, and its seconds by phase and in total."""

    decision: BatchDecision
    results: SearchResults
    phases: dict[str, float]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return {
            "decision": asdict(self.decision),
            "measurements": [asdict(one) for one in self.results.measurements],
            "contests": [[asdict(one) for one in contest] for contest in self.results.contests],
            "phases": self.phases,
            "seconds": self.seconds,
        }


class SearchedModel:
    """One GPT, and the searches over the same sizes that are compared, all on one session in this process.

    Attributes:
        sizes: the candidate sizes.
        searches, alone: every search of ours that was compared: over both precisions, and over fp32.
        passes: of each point of the grid, the seconds of its passes and of its updates, of all repetitions.
    """

    def __init__(self, options: TuneOptions, width: int) -> None:
        self.name, self.width, self.sizes = f"gpt {width}", width, sizes_free(options.rows, 1)
        self._options = options
        self.session = session_of(_gpt_job(options, width=width, size=options.rows))
        self.session.prepare("fp32")
        self.probe = StepProbe(self.session)
        self._budget = memory_budget(self.session)
        self.points = [Candidate(precision, size) for precision in PRECISIONS for size in self.sizes]
        self.searches: list[FinishedSearch] = []
        self.alone: list[FinishedSearch] = []
        self.passes: dict[Candidate, tuple[list[float], list[float]]] = {}

    def arms(self) -> dict[str, Callable[[], float]]:
        """Every kind of search, by name; it returns its seconds."""

        def ours(precisions: Sequence[str], kept: list[FinishedSearch]) -> float:
            kept.append(self.search(precisions, budget=self._budget))
            return kept[-1].seconds

        return {
            "grid": lambda: timed(self._grid),
            "search": lambda: ours(PRECISIONS, self.searches),
            "search, fp32 alone": lambda: ours(("fp32",), self.alone),
            "doubling": self._doubling,
        }

    def warm_up(self) -> None:
        """Run every kernel for every size once, so that no arm is charged for the warm-up."""
        for point in self.points:
            self._time(point, passes=1)

    def _time(self, point: Candidate, *, passes: int = PASSES) -> Measurement:
        return self.probe.measure(point, budget=None, passes=passes, with_memory=False)

    def _grid(self) -> None:
        """Time every candidate, without its memory."""
        for one in map(self._time, self.points):
            if one.outcome == "ok":
                passes, updates = self.passes.setdefault(one.candidate, ([], []))
                passes += one.pass_s
                updates += one.update_s

    def grid_scores(self) -> dict[Candidate, float]:
        """Rows per second of every point of the grid, from the median over all its passes in all repetitions."""
        space = self._space(PRECISIONS, budget=None)
        return {
            point: space.score(point.micro_batch_size, statistics.median(passes), updates)
            for point, (passes, updates) in self.passes.items()
        }

    def _space(self, precisions: Sequence[str], *, budget: int | None) -> BatchSpace:
        """All sizes. A step has the rows of the largest one, or with `free` of one micro-batch."""
        rows = None if self._options.free else self.sizes[-1]
        return BatchSpace(tuple(precisions), self.sizes, rows, budget)

    def search(self, precisions: Sequence[str], *, budget: int | None) -> FinishedSearch:
        """Run our search, without prior measurements."""
        space = self._space(precisions, budget=budget)
        results = SearchResults()
        phases: dict[str, float] = {}
        began = time.perf_counter()
        while proposals := next_proposals(space, results):
            proposal, at = proposals[0], time.perf_counter()
            results.add(self.probe.run_proposal(proposal, budget=budget))
            phase = _phase(proposal)
            phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - at
        return FinishedSearch(decide(space, results), results, phases, time.perf_counter() - began)

    def _doubling(self) -> float:
        """The seconds of 3 steps and 3 validation batches of every size from 2 to the largest, in fp32, without the
        final size that runs out of memory."""
        session = self.session
        with preserve_model(session.trainable, session.device), preserve_optimizers(session.optimizers):
            began = time.perf_counter()
            for size in self.sizes[1:]:
                micro = session.loader.one(session.loader.batches.rows_from(session.state.cursor, size))
                session.trainable.module.train()
                for number in range(DOUBLING_STEPS):
                    session.step.run(iter([micro]), global_weight=micro.weight, step=number + 1, passes=1)
                session.trainable.module.eval()
                with torch.no_grad():
                    for _ in range(DOUBLING_STEPS):
                        session.step.forward(micro.batch, global_weight=micro.weight)
            return time.perf_counter() - began

    def peaks(self) -> dict[int, int]:
        """The measured peak bytes of every size in fp32."""
        found = {
            size: self.probe.measure(Candidate("fp32", size), budget=None, passes=0, with_memory=True)
            for size in self.sizes
        }
        return {size: one.peak_bytes or 0 for size, one in found.items()}

    def weights_hash(self) -> str:
        """Of all parameters."""
        total = hashlib.sha256()
        for parameter in self.session.trainable.module.parameters():
            total.update(parameter.detach().cpu().numpy().tobytes())
        return total.hexdigest()


def _gpt_job(options: TuneOptions, *, width: int, size: int) -> dict[str, Any]:
    """A GPT of two layers on random tokens, in micro-batches of `size` rows."""
    draw = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(VOCABULARY, (options.rows, options.context + 1), generator=draw)
    data = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    model = gpt_model(options, layers=2, width=width, vocab_size=VOCABULARY)
    batch = size if options.free else options.rows
    loop = {"global_batch_size": batch, "micro_batch_size": size, "log_every": 0}
    return job_of(
        options, model, data, name="tune", loop=loop, threads=options.thread_count, precision={"dtype": "fp32"}
    )


def _phase(proposal: Proposal) -> str:
    if proposal.against:
        return "in turn, and the peak" if proposal.with_memory else "in turn"
    return "time and peak" if proposal.passes and proposal.with_memory else "time" if proposal.passes else "peak"


def _named(point: Candidate) -> str:
    return f"{point.precision} x {point.micro_batch_size}"


# ---------------------------------------------------------------- cost and result


def _measure_model(found: BenchMeasurement, options: TuneOptions, width: int, say: Say) -> SearchedModel:
    """Compare the time of the searches over one model, then the throughput at the points that they lead to."""
    model = SearchedModel(options, width)
    name, before = model.name, model.weights_hash()
    say(f"{name}: {len(model.sizes)} sizes in {' and '.join(PRECISIONS)}")
    model.warm_up()
    times = alternate(model.arms(), blocks=options.repeats, dropped=0)
    found.arms |= {f"{name}, {arm}": values for arm, values in times.items()}
    unchanged = before == model.weights_hash()
    found.gate(Check(f"{name}: the searches do not change the weights", unchanged, "hash of the parameters"))
    found.compare(times, of="search", to="grid", name=f"{name}: time of the search / of the grid",
                  goal=Goal(at_most=OF_THE_GRIDS_TIME))  # fmt: skip
    label = f"{name}: time of the search in fp32 / of doubling"
    found.compare(times, of="search, fp32 alone", to="doubling", name=label, goal=Goal(at_most=OF_DOUBLINGS_TIME))
    _compare_with_best(found, options, model, say)
    return model


def _compare_with_best(found: BenchMeasurement, options: TuneOptions, model: SearchedModel, say: Say) -> None:
    """Train at the chosen point and at the grid's best, in turn; a value is the seconds per row."""
    scores = model.grid_scores()
    best = max(scores, key=lambda point: scores[point])
    chosen = model.searches[0].decision.candidate
    say(f"{model.name}: chose {_named(chosen)}; the grid's best is {_named(best)}")
    ours, theirs = f"at the chosen point, {_named(chosen)}", f"at the grid's best, {_named(best)}"
    arms = {ours: _training(options, model.width, chosen), theirs: _training(options, model.width, best)}
    times = alternate(arms, blocks=options.blocks)
    found.arms |= {f"{model.name}, {arm}": values for arm, values in times.items()}
    found.compare(times, of=theirs, to=ours, name=f"{model.name}: throughput at the choice / at the grid's best",
                  goal=Goal(at_least=OF_THE_BEST))  # fmt: skip
    found.values[model.name] = {
        "chosen": [_named(one.decision.candidate) for one in model.searches],
        "fp32_alone": [_named(one.decision.candidate) for one in model.alone],
        "grid_best": _named(best),
        "grid_rows_per_s": {_named(point): score for point, score in scores.items()},
        "searches": [one.to_json() for one in model.searches],
    }


def _training(options: TuneOptions, width: int, point: Candidate) -> Callable[[], float]:
    """A block of training steps at one point; returns the seconds per row."""
    arm = SessionArm(_gpt_job(options, width=width, size=point.micro_batch_size), precision=point.precision)
    rows = arm.session.loader.batches.global_batch_size
    arm.run(1)
    steps = max(1, min(1000, round(options.block_s / arm.run(1))))
    return lambda: arm.run(steps) / (steps * rows)


def _claim_goals(found: BenchMeasurement, model: SearchedModel) -> None:
    """The claims about one model that follow from its ratios and its grid."""
    ratios = {ratio.name: ratio for ratio in found.ratios}
    rate = ratios[f"{model.name}: throughput at the choice / at the grid's best"]
    cost = ratios[f"{model.name}: time of the search / of the grid"]
    double = ratios[f"{model.name}: time of the search in fp32 / of doubling"]
    found.claim(
        f"{model.name}: at least {OF_THE_BEST} of the grid's best in at most {OF_THE_GRIDS_TIME} of its time",
        bool(rate.met and cost.met),
        f"{rate} in {cost}; chose {', '.join(_named(one.decision.candidate) for one in model.searches)}",
    )
    measured = [{one.candidate for one in search.results.measurements} for search in model.searches]
    sizes = max(max(Counter(point.precision for point in points).values()) for points in measured)
    found.claim(
        f"{model.name}: at most {MOST_SIZES} sizes of a precision, {OF_DOUBLINGS_TIME} of doubling's time",
        sizes <= MOST_SIZES and bool(double.met),
        f"{sizes} sizes, {double}",
    )
    scores = model.grid_scores()
    best = {name: max(score for point, score in scores.items() if point.precision == name) for name in PRECISIONS}
    gain = best["bf16"] / best["fp32"]
    wanted = "bf16" if gain > 1 + WORTHWHILE_GAIN else "fp32"
    chose = [one.decision.candidate.precision for one in model.searches]
    tie = abs(gain / (1 + WORTHWHILE_GAIN) - 1) < WORTHWHILE_GAIN
    found.claim(
        f"{model.name}: the precision is the grid's",
        tie or all(one == wanted for one in chose),
        f"chose {', '.join(chose)}; bf16's best is {gain:.2f} times fp32's in the grid",
    )


# ---------------------------------------------------------------- ceilings


def _measure_ceilings(
    found: BenchMeasurement, options: TuneOptions, model: SearchedModel, say: Say
) -> list[dict[str, Any]]:
    """Search within budgets that given sizes just fit in; fp32."""
    ceilings: list[dict[str, Any]] = []
    sizes, scores = model.sizes, model.grid_scores()
    peaks, again = model.peaks(), model.peaks()
    for rows in options.ceilings:
        following = sizes[sizes.index(rows) + 1]
        budget = (peaks[rows] + peaks[following]) // 2
        one = model.search(("fp32",), budget=budget)
        speeds = {size: scores[Candidate("fp32", size)] for size in sizes if peaks[size] <= budget}
        best = max(speeds, key=lambda size: speeds[size])
        right = [size for size in speeds if size <= best and speeds[size] >= (1 - NEAR) * speeds[best]]
        chosen = one.decision.candidate.micro_batch_size
        row = {
            "budget": budget, "fits": rows, "best_that_fits": best, "near_the_best": right, "chosen": chosen,
            "steps_apart": min(abs(sizes.index(size) - sizes.index(chosen)) for size in right),
            "readings_differ": max(abs(peaks[size] - again[size]) for size in (rows, following)),
            "half_way": budget - peaks[rows],
            "predicted_peak": one.decision.chosen.predicted_peak,
            "measured_peak": one.decision.chosen.measured_peak,
            "out_of_memory": [
                each.candidate.micro_batch_size for each in one.results.measurements if each.outcome == "out_of_memory"
            ],
        }  # fmt: skip
        say(f"{model.name}: {rows} rows just fit; chose {chosen}, near the best that fits are {right}")
        ceilings.append(row)
    found.values["ceilings"], found.values["peaks"] = ceilings, [peaks, again]
    return ceilings
