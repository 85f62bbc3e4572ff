"""Bench `tune`: result and cost of the search for batch size and precision, against an exhaustive grid.

It uses a wide and a narrow GPT. The grid times every size in every precision. Our search also measures memory, confirms
a peak, and compares its winner with the other candidates again, in alternation. Both run in turn
in this process, after a warm-up of all kernels, without the overhead of Ray.

A ceiling is a memory budget half-way between the measured peaks of two neighbouring sizes. It is meaningful only if
that distance exceeds the difference between two readings of one peak, which is reported too; for the narrow GPT, 4 and
8 rows differ by 1 % of the process. Throughput saturates with the size: any size up to the fastest that fits counts as
right if its throughput is within `NEAR` of it.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from cluster.config import Count
from cluster.devices.inventory import local_inventory
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, matrix_units
from jobs.bench.harness.options import BenchOptions, key
from jobs.bench.harness.sessions import SessionArm, gpt_model, job_of, restored_threads, timed
from jobs.driver.local_session import session_of
from raytrain.autotune.batch_search import PASSES, BatchDecision, SearchResults, decide, next_proposals
from raytrain.autotune.measurement import WORTHWHILE_GAIN, Candidate, Measurement
from raytrain.autotune.micro_batch import memory_budget
from raytrain.autotune.size_curve import NEAR, BatchSpace, sizes_free
from raytrain.autotune.step_probe import StepProbe
from raytrain.errors import InputError

MIB = 2**20
VOCABULARY = 256
PRECISIONS = ("fp32", "bf16")
#: Goals of the search.
OF_THE_BEST, OF_THE_GRIDS_TIME = Goal(at_least=0.95), Goal(at_most=0.25)


class TuneOptions(BenchOptions):
    blocks: Count = key(15, "repetitions of the chosen point against the grid's best", quick=2)
    repeats: Count = key(3, "runs of the grid and of the search, in turn", quick=2)
    wide: Count = key(256, "width of one GPT of two layers", quick=32)
    narrow: Count = key(64, "width of the other", quick=16)
    context: Count = key(64, "tokens of a window of both", quick=16)
    rows: Count = key(256, "rows of a step, and the largest micro-batch; a power of two", quick=16)
    block_s: float = key(0.25, "seconds that one block of the chosen point should take", quick=0.0, ge=0)
    ceilings: list[Count] = key([4, 8, 32], "micro-batch sizes that just fit in the injected budgets", quick=[2])


def run(options: TuneOptions, found: BenchMeasurement) -> None:
    """Measure the wide and the narrow model, then the injected ceilings; see `TuneOptions`."""
    if options.rows & (options.rows - 1):
        raise InputError("rows", got=str(options.rows), expected="a power of two")
    smaller = sizes_free(options.rows, 1)[:-1]
    for rows in options.ceilings:
        if rows not in smaller:
            raise InputError("ceilings", got=str(rows), expected=f"a power of two below {options.rows}")
    found.block = "seconds of one search, or of one row of training"
    found.values["matrix_units"] = matrix_units(local_inventory().cpu_flags)
    with restored_threads():
        for width in (options.wide, options.narrow):
            model = SearchedModel(options, width)
            _compare_with_grid(found, options, model)
            _compare_with_best(found, options, model)
        _measure_ceilings(found, options, model)


class SearchedModel:
    """One GPT, and the searches over the same sizes that are compared, all on one session in this process."""

    def __init__(self, options: TuneOptions, width: int) -> None:
        self.name, self.width, self.sizes = f"gpt {width}", width, sizes_free(options.rows, 1)
        self._options = options
        self.session = session_of(gpt_job(options, width=width, size=options.rows))
        self.session.prepare("fp32")
        self.probe, self.budget = StepProbe(self.session), memory_budget(self.session)
        self.points = [Candidate(precision, size) for precision in PRECISIONS for size in self.sizes]
        self.decisions: list[BatchDecision] = []
        self.searches: list[SearchResults] = []
        self.passes: dict[Candidate, tuple[list[float], list[float]]] = {}  # seconds of passes and updates, in the grid

    def measure(self, point: Candidate, *, passes: int, with_memory: bool = False) -> Measurement:
        return self.probe.measure(point, budget=None, passes=passes, with_memory=with_memory)

    def run_grid(self) -> None:
        """Time every candidate, without its memory."""
        for point in self.points:
            one = self.measure(point, passes=PASSES)
            if one.outcome == "ok":
                passes, updates = self.passes.setdefault(point, ([], []))
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
        return BatchSpace(tuple(precisions), self.sizes, self.sizes[-1], budget)

    def run_search(self) -> None:
        decision, results = self.search(PRECISIONS, budget=self.budget)
        self.decisions.append(decision)
        self.searches.append(results)

    def search(self, precisions: Sequence[str], *, budget: int | None) -> tuple[BatchDecision, SearchResults]:
        space, results = self._space(precisions, budget=budget), SearchResults()
        while proposals := next_proposals(space, results):
            results.add(self.probe.run_proposal(proposals[0], budget=budget))
        return decide(space, results), results

    def peaks(self) -> dict[int, int]:
        """The measured peak bytes of every size in fp32."""
        found = {size: self.measure(Candidate("fp32", size), passes=0, with_memory=True) for size in self.sizes}
        return {size: one.peak_bytes or 0 for size, one in found.items()}

    def weights_hash(self) -> str:
        total = hashlib.sha256()
        for parameter in self.session.trainable.module.parameters():
            total.update(parameter.detach().cpu().numpy().tobytes())
        return total.hexdigest()


def gpt_job(options: TuneOptions, *, width: int, size: int) -> dict[str, Any]:
    """A GPT of two layers on random tokens, in micro-batches of `size` rows."""
    draw = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(VOCABULARY, (options.rows, options.context + 1), generator=draw)
    data = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    model = gpt_model(options, layers=2, width=width, vocab_size=VOCABULARY)
    loop = {"global_batch_size": options.rows, "micro_batch_size": size, "log_every": 0}
    return job_of(
        options, model, data, name="tune", loop=loop, threads=options.thread_count, precision={"dtype": "fp32"}
    )


def _named(point: Candidate) -> str:
    return f"{point.precision} x {point.micro_batch_size}"


def _compare_with_grid(found: BenchMeasurement, options: TuneOptions, model: SearchedModel) -> None:
    """The time of the search over that of the grid, and the precisions that both choose."""
    name, before = model.name, model.weights_hash()
    found.say(f"{name}: {len(model.sizes)} sizes in {' and '.join(PRECISIONS)}")
    for point in model.points:  # every kernel once, so that no arm is charged for the warm-up
        model.measure(point, passes=1)
    arms = {"grid": lambda: timed(model.run_grid), "search": lambda: timed(model.run_search)}
    times = found.alternate(arms, blocks=options.repeats, dropped=0, named=f"{name}, {{}}")
    unchanged = before == model.weights_hash()
    found.gate(Check(f"{name}: the searches do not change the weights", unchanged, "hash of the parameters"))
    label = f"{name}: time of the search / of the grid"
    found.compare(times, of="search", to="grid", name=label, goal=OF_THE_GRIDS_TIME)
    scores = model.grid_scores()
    best = {name: max(score for point, score in scores.items() if point.precision == name) for name in PRECISIONS}
    gain = best["bf16"] / best["fp32"]
    wanted = "bf16" if gain > 1 + WORTHWHILE_GAIN else "fp32"
    chose = [decision.candidate.precision for decision in model.decisions]
    tie = abs(gain / (1 + WORTHWHILE_GAIN) - 1) < WORTHWHILE_GAIN
    found.claim(
        f"{name}: the precision is the grid's",
        tie or all(one == wanted for one in chose),
        f"chose {', '.join(chose)}; bf16's best is {gain:.2f} times fp32's in the grid",
    )


def _compare_with_best(found: BenchMeasurement, options: TuneOptions, model: SearchedModel) -> None:
    """Train at the chosen point and at the grid's best, in turn; a value is the seconds per row."""
    scores = model.grid_scores()
    best = max(scores, key=lambda point: scores[point])
    chosen = model.decisions[0].candidate
    found.say(f"{model.name}: chose {_named(chosen)}; the grid's best is {_named(best)}")
    ours, theirs = f"at the chosen point, {_named(chosen)}", f"at the grid's best, {_named(best)}"
    arms = {ours: _training(options, model.width, chosen), theirs: _training(options, model.width, best)}
    times = found.alternate(arms, blocks=options.blocks, named=f"{model.name}, {{}}")
    label = f"{model.name}: throughput at the choice / at the grid's best"
    found.compare(times, of=theirs, to=ours, name=label, goal=OF_THE_BEST)
    found.values[model.name] = {
        "chosen": [_named(decision.candidate) for decision in model.decisions],
        "grid_best": _named(best),
        "grid_rows_per_s": {_named(point): score for point, score in scores.items()},
        "decisions": [asdict(decision) for decision in model.decisions],
        "measurements": [[asdict(one) for one in search.measurements] for search in model.searches],
    }


def _training(options: TuneOptions, width: int, point: Candidate) -> Callable[[], float]:
    """A block of training steps at one point; returns the seconds per row."""
    arm = SessionArm(gpt_job(options, width=width, size=point.micro_batch_size), precision=point.precision)
    arm.run(1)
    steps = max(1, min(1000, round(options.block_s / arm.run(1))))
    return lambda: arm.run(steps) / (steps * options.rows)


def _measure_ceilings(found: BenchMeasurement, options: TuneOptions, model: SearchedModel) -> None:
    """Search within budgets that given sizes just fit in; fp32."""
    ceilings: list[dict[str, Any]] = []
    sizes, scores = model.sizes, model.grid_scores()
    peaks, again = model.peaks(), model.peaks()
    for rows in options.ceilings:
        following = sizes[sizes.index(rows) + 1]
        budget = (peaks[rows] + peaks[following]) // 2
        decision, _ = model.search(("fp32",), budget=budget)
        speeds = {size: scores[Candidate("fp32", size)] for size in sizes if peaks[size] <= budget}
        best = max(speeds, key=lambda size: speeds[size])
        right = [size for size in speeds if size <= best and speeds[size] >= (1 - NEAR) * speeds[best]]
        chosen = decision.candidate.micro_batch_size
        ceilings.append({
            "budget": budget, "fits": rows, "near_the_best": right, "chosen": chosen,
            "steps_apart": min(abs(sizes.index(size) - sizes.index(chosen)) for size in right),
            "readings_differ": max(abs(peaks[size] - again[size]) for size in (rows, following)),
            "half_way": budget - peaks[rows],
            "predicted_peak": decision.chosen.predicted_peak, "measured_peak": decision.chosen.measured_peak,
        })  # fmt: skip
        found.say(f"{model.name}: {rows} rows just fit; chose {chosen}, near the best that fits are {right}")
    found.values |= {"ceilings": ceilings, "peaks": [peaks, again]}
    found.claim(
        "under an injected ceiling the choice is at most one size away, and no process dies",
        all(row["steps_apart"] <= 1 and row["chosen"] <= row["fits"] for row in ceilings),
        "; ".join(
            f"{row['fits']} rows fit: {row['chosen']}, right {row['near_the_best']}; {row['half_way'] / MIB:.1f} MiB"
            f" from the peaks, readings {row['readings_differ'] / MIB:.1f} MiB apart"
            for row in ceilings
        ),
    )
