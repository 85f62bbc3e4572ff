"""The search over batch size and precision, driven by machines made of formulas, against brute force."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest

from raytrain.autotune.batch_search import (
    LEAST_PASSES,
    BatchDecision,
    Measured,
    Proposal,
    SearchResults,
    decide,
    next_proposals,
)
from raytrain.autotune.measurement import Candidate, Measurement, nearly_equal
from raytrain.autotune.size_curve import MOST_SIZES, BatchSpace, SizeCurve, sizes_dividing, sizes_free
from raytrain.errors import RunError
from raytrain.plan.choice import size_text

Curve = Callable[[int], float]
POWERS = sizes_free(4096, 1)


@dataclass
class Machine:
    """Seconds and bytes by formula, with noise; answers proposals as a session would.

    Attributes:
        seconds: precision -> size -> seconds of a pass.
        noise: relative standard deviation of a pass; one in twenty takes half as long again on top.
        broken: precision -> what every pass of it ends with.
        refuses: sizes at which a pass fails.
        computes: precision -> (loss, gradient norm) of a first pass; (1, 1) unless said.
    """

    seconds: dict[str, Curve]
    peak: Curve = field(default=lambda size: 1e9 + 1e6 * size)
    update_s: float = 0.001
    noise: float = 0.0
    seed: int = 0
    broken: dict[str, Any] = field(default_factory=dict)
    refuses: tuple[int, ...] = ()
    computes: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw, self.now = random.Random(self.seed), 0.0

    def measure(self, wanted: Proposal, budget: int | None) -> Measurement:
        point, size = wanted.candidate, wanted.candidate.micro_batch_size
        if point.precision in self.broken:
            return Measurement(point, self.broken[point.precision], reason="no kernel")
        if size in self.refuses:
            return Measurement(point, "error", reason="expected more than 1 value per channel")
        peak = round(self.peak(size))
        if budget is not None and peak > budget:
            known = peak if wanted.with_memory else None
            why = f"a peak of {size_text(peak)}, the budget is {size_text(budget)}"
            return Measurement(point, "out_of_memory", peak_bytes=known, floor_bytes=10**9, reason=why)
        times: tuple[float, ...] = ()
        while len(times) < wanted.passes and not (len(times) >= LEAST_PASSES and nearly_equal(times)):
            times += (self._noisy(self.seconds[point.precision](size)),)
        read = (peak, 10**9) if wanted.with_memory else (None, None)
        self.now += 1.0
        return Measurement(point, "ok", times, (self.update_s,) * len(times), *read, **self._plain(point))

    def _plain(self, point: Candidate) -> dict[str, Any]:
        loss, norm = self.computes.get(point.precision, (1.0, 1.0))
        return {"loss": loss, "grad_norm": norm, "taken_at": self.now}

    def contend(self, wanted: Proposal) -> Measured:
        """Rounds in turn."""
        points = (wanted.candidate, *wanted.against)
        speeds = [self.seconds[one.precision](one.micro_batch_size) for one in points]
        rounds = [[self._noisy(seconds) for seconds in speeds] for _ in range(wanted.passes)]
        self.now += 1.0
        columns = zip(points, zip(*rounds, strict=True), strict=True)
        return tuple(
            Measurement(one, "ok", times, (self.update_s,) * len(times), **self._plain(one)) for one, times in columns
        )

    def _noisy(self, seconds: float) -> float:
        outlier = 1.5 if self.noise and self.draw.random() < 0.05 else 1.0
        return seconds * math.exp(self.draw.gauss(0.0, self.noise)) * outlier


@dataclass
class Searched:
    decision: BatchDecision
    asked: list[Proposal]
    results: SearchResults

    @property
    def measurements(self) -> list[Measurement]:
        return self.results.measurements

    @property
    def comparisons(self) -> list[Measured]:
        return self.results.comparisons


def searched(space: BatchSpace, machine: Machine) -> Searched:
    """One proposal after the other, to the end."""
    results, asked = SearchResults(), list[Proposal]()
    while proposals := next_proposals(space, results):
        assert len(proposals) <= space.devices and len(asked) < 60
        asked.append(wanted := proposals[0])
        alone = machine.measure(replace(wanted, passes=0) if wanted.against else wanted, space.budget_bytes)
        if not wanted.against or (wanted.with_memory and alone.outcome != "ok"):
            results.add((alone,))
            continue
        first, *others = machine.contend(wanted)
        results.add((replace(first, peak_bytes=alone.peak_bytes, floor_bytes=alone.floor_bytes), *others))
    return Searched(decide(space, results), asked, results)


def scores(space: BatchSpace, machine: Machine, precision: str = "fp32") -> dict[int, float]:
    """Brute force: what every size that fits would reach without noise."""
    fits = [s for s in space.sizes if space.budget_bytes is None or machine.peak(s) <= space.budget_bytes]
    return {size: space.score(size, machine.seconds[precision](size), [machine.update_s]) for size in fits}


def steps_apart(space: BatchSpace, one: int, other: int) -> int:
    return abs(space.sizes.index(one) - space.sizes.index(other))


def smallest_near(found: dict[int, float]) -> int:
    return min(size for size, score in found.items() if score >= 0.97 * max(found.values()))


def drawn(seed: int, *, jump: bool = False, noise: float = 0.0) -> tuple[BatchSpace, Machine]:
    """A line of time over the rows, perhaps bent upwards (or with a jump) where a cache ends; a budget or none; a free
    batch or one of 1024 rows."""
    draw = random.Random(seed)
    fixed = 10 ** draw.uniform(-4, -1)
    per_row = fixed / 10 ** draw.uniform(-1, 2.2)
    cliff = draw.choice([math.inf, 2.0 ** draw.randint(2, 10)])
    extra = draw.uniform(0.05, 0.6) * per_row
    slope = 10 ** draw.uniform(4, 7)
    budget = draw.choice([None, round(1e9 + slope * 2 ** draw.uniform(1, 12))])
    rows = draw.choice([None, 1024])

    def seconds(size: int) -> float:
        beyond = 0.0 if size <= cliff else float(size) if jump else size - cliff
        return fixed + per_row * size + extra * beyond

    machine = Machine(
        {"fp32": seconds}, peak=lambda size: 1e9 + slope * size, update_s=10 ** draw.uniform(-4, -1), noise=noise,
        seed=seed,
    )  # fmt: skip
    return BatchSpace(("fp32",), POWERS if rows is None else sizes_dividing(rows, 1), rows, budget), machine


def share_of_best(space: BatchSpace, machine: Machine, found: Searched) -> float:
    truth = scores(space, machine)
    return truth[found.decision.candidate.micro_batch_size] / max(truth.values())


# ---------------------------------------------------------------- against brute force


@pytest.mark.parametrize("seed", range(150))
def test_without_noise_it_agrees_with_brute_force(seed: int) -> None:
    space, machine = drawn(seed)
    found = searched(space, machine)
    truth = scores(space, machine)
    assert share_of_best(space, machine, found) >= 0.95
    assert steps_apart(space, found.decision.candidate.micro_batch_size, smallest_near(truth)) <= 3
    assert found.decision.complete
    assert len({one.candidate for one in found.measurements}) <= MOST_SIZES


def test_most_choices_are_the_very_size_of_brute_force() -> None:
    apart = []
    for seed in range(150):
        space, machine = drawn(seed)
        chosen = searched(space, machine).decision.candidate.micro_batch_size
        apart.append(steps_apart(space, chosen, smallest_near(scores(space, machine))))
    assert sum(one == 0 for one in apart) >= 120 and sum(one <= 1 for one in apart) >= 147


def test_a_jump_where_a_cache_ends_costs_little() -> None:
    shares = sorted(share_of_best(*drawn(seed, jump=True), searched(*drawn(seed, jump=True))) for seed in range(150))
    assert shares[0] >= 0.82 and shares[8] >= 0.93  # the worst: a lone peak between the two first sizes


@pytest.mark.parametrize(("noise", "almost_all"), [(0.01, 0.95), (0.03, 0.92), (0.08, 0.88)])
def test_noise_costs_little(noise: float, almost_all: float) -> None:
    """Nineteen of twenty choices reach so much of the best, and none spends more than it may."""
    shares = []
    for seed in range(150):
        space, machine = drawn(seed, noise=noise)
        found = searched(space, machine)
        shares.append(share_of_best(space, machine, found))
        assert len({one.candidate for one in found.measurements}) <= MOST_SIZES
    assert sorted(shares)[7] >= almost_all


@pytest.mark.parametrize(("spread", "chosen"), [(0.0, 16), (0.004, 16), (0.04, 32)])
def test_a_smaller_size_has_to_be_near_the_best_by_more_than_the_passes_vary(spread: float, chosen: int) -> None:
    """16 rows reach 98.2 % of the rate of 32; 97 % is near enough."""
    space = BatchSpace(precisions=("fp32",), sizes=(16, 32), rows_per_step=32, budget_bytes=None)
    measured = [
        Measurement(
            Candidate("fp32", size), "ok", update_s=(0.0,),
            pass_s=tuple(seconds * (1 + sign * spread) for sign in (-1, 0, 1)),
        )
        for size, seconds in ((16, 0.0163), (32, 0.032))
    ]  # fmt: skip
    assert SizeCurve(space, "fp32", measured).chosen == Candidate("fp32", chosen)


@pytest.mark.parametrize("seed", range(40))
def test_a_precision_is_chosen_as_brute_force_would(seed: int) -> None:
    draw = random.Random(seed)
    costs = {name: (10 ** draw.uniform(-3, -1), 10 ** draw.uniform(-5, -3)) for name in ("fp32", "bf16", "fp16")}
    machine = Machine({name: lambda size, c=cost: c[0] + c[1] * size for name, cost in costs.items()})
    space = BatchSpace(tuple(costs), POWERS, None, 10**10)
    found = searched(space, machine).decision
    best = {name: max(scores(space, machine, name).values()) for name in costs}
    assert best[found.candidate.precision] >= 0.94 * max(best.values())
    if best["fp32"] >= max(best.values()) / 1.03:
        assert best[found.candidate.precision] >= best["fp32"]
    assert found.complete


# ---------------------------------------------------------------- memory


def rising(size: int) -> float:
    """Throughput rises up to the largest size."""
    return 1.0 + 1e-6 * size


@pytest.mark.parametrize("rows", [1, 3, 5, 40, 100, 1000, 5000])
def test_a_ceiling_is_answered_without_passing_it(rows: int) -> None:
    machine = Machine({"fp32": rising})
    space = BatchSpace(("fp32",), POWERS, None, round(machine.peak(rows)))
    found = searched(space, machine)
    largest = max(size for size in POWERS if size <= rows)
    assert found.decision.candidate.micro_batch_size == largest
    peak = found.decision.chosen.measured_peak
    assert peak is not None and peak <= (space.budget_bytes or 0) and found.decision.chosen.predicted_peak is not None
    if rows >= 16:  # the two first sizes fit: nothing ever runs out
        assert all(one.outcome == "ok" for one in found.measurements)
        assert found.decision.chosen.predicted_peak == pytest.approx(peak, rel=1e-3)
    assert rows >= 4096 or f"memory allows up to {largest}" in found.decision.micro_batch_size.reason


def test_the_peak_of_the_choice_is_confirmed_once() -> None:
    found = searched(BatchSpace(("fp32",), POWERS, None, 10**10), Machine({"fp32": lambda size: 0.01 + 1e-4 * size}))
    (first, last) = [one for one in found.asked if one.with_memory]
    assert first == found.asked[0], "there is room for far more, so that one small size is enough until then"
    assert last.candidate == found.decision.candidate and last == found.asked[-1]


def test_a_peak_above_its_prediction_leads_to_a_smaller_size() -> None:
    """The line says that 512 rows fit; a kernel that takes more from 256 on is found by the confirmation."""
    machine = Machine({"fp32": rising}, peak=lambda size: 1e9 + 1e6 * size * (3 if size >= 256 else 1))
    found = searched(BatchSpace(("fp32",), POWERS, None, round(1e9 + 600e6)), machine)
    outcomes = {one.candidate.micro_batch_size: one.outcome for one in found.measurements}
    assert outcomes[512] == "out_of_memory" or outcomes[256] == "out_of_memory"
    chosen = found.decision.candidate.micro_batch_size
    assert chosen < 256 and machine.peak(chosen) <= 1.6e9 and found.decision.complete


@pytest.mark.parametrize("per_row", [0.3, 1.1, 2.6, 5.3])
@pytest.mark.parametrize("budget", [2, 10, 80])
def test_an_allocator_with_large_blocks_does_not_distort_the_measurement(per_row: float, budget: int) -> None:
    """Two small sizes differ by a piece of 20 MiB or by none."""
    piece = 20 << 20

    def peak(size: int) -> float:
        return piece * math.ceil((3e8 + per_row * 2**20 * size) / piece)

    machine = Machine({"fp32": rising}, peak=peak)
    space = BatchSpace(("fp32",), sizes_free(2**15, 1), None, budget << 30)
    found = searched(space, machine).decision
    assert steps_apart(space, found.candidate.micro_batch_size, max(scores(space, machine))) <= 1
    assert found.chosen.measured_peak is not None and found.chosen.measured_peak <= budget << 30


def test_nothing_fits() -> None:
    space = BatchSpace(("fp32", "bf16"), POWERS, None, 10**9)
    with pytest.raises(
        RunError, match=r"no micro-batch fits into 954 MiB.*1 row: a peak of 955 MiB.*cluster.memory_limit"
    ):
        searched(space, Machine({"fp32": rising, "bf16": rising}))


def test_without_a_budget_memory_is_not_read() -> None:
    found = searched(BatchSpace(("fp32",), POWERS, None, None), Machine({"fp32": rising}))
    assert not any(one.with_memory for one in found.asked) and found.decision.chosen.measured_peak is None


# ---------------------------------------------------------------- what cannot run


def test_a_size_at_which_a_pass_fails_is_excluded() -> None:
    machine = Machine({"fp32": lambda size: 0.01 + 1e-3 * size}, refuses=(2,))
    found = searched(BatchSpace(("fp32",), POWERS, None, 10**10), machine).decision
    assert found.candidate.micro_batch_size in (128, 256, 512)
    assert [row.note for row in found.table if row.micro_batch_size == 2] == ["expected more than 1 value per channel"]


@pytest.mark.parametrize("outcome", ["error", "nonfinite"])
def test_a_precision_that_does_not_run_is_refused_with_its_reason(outcome: str) -> None:
    machine = Machine({"fp32": rising, "fp16": rising}, broken={"fp16": outcome})
    found = searched(BatchSpace(("fp32", "fp16"), POWERS, None, 10**10), machine)
    assert found.decision.candidate.precision == "fp32" and "no kernel" in found.decision.refusals["fp16"]
    assert sum(one.candidate.precision == "fp16" for one in found.asked) <= 2


def test_nothing_runs_at_all() -> None:
    machine = Machine({"fp32": rising}, broken={"fp32": "error"})
    with pytest.raises(RunError, match=r"no candidate of precision.dtype and loop.micro_batch_size can run.*no kernel"):
        searched(BatchSpace(("fp32",), POWERS, None, 10**10), machine)


def test_if_the_reference_does_not_run_the_other_precision_is_chosen() -> None:
    machine = Machine({"fp32": rising, "bf16": rising}, broken={"fp32": "error"})
    assert searched(BatchSpace(("fp32", "bf16"), POWERS, None, 10**10), machine).decision.candidate.precision == "bf16"


def test_there_is_no_decision_before_a_measurement() -> None:
    with pytest.raises(RunError, match="nothing has been measured"):
        decide(BatchSpace(("fp32",), POWERS, None, None), SearchResults())


# ---------------------------------------------------------------- precision


def two(speed: float, **more: Any) -> tuple[BatchSpace, Machine]:
    """bf16 so many times as fast as fp32 at every size."""
    times = {"fp32": lambda size: 0.01 + 1e-3 * size, "bf16": lambda size: (0.01 + 1e-3 * size) / speed}
    return BatchSpace(("fp32", "bf16"), POWERS, None, 10**10), Machine(times, update_s=0.0, **more)


def test_a_faster_precision_that_computes_the_same_is_chosen() -> None:
    decision = searched(*two(2.0)).decision
    assert decision.candidate.precision == "bf16"
    assert "1.97 times as fast as fp32 can be at any size" in decision.precision.reason
    assert "loss and gradient norm agree" in decision.precision.reason


def test_a_reference_that_cannot_win_any_more_is_not_measured_further_unless_the_other_is_refused() -> None:
    def asked_of_fp32(machine: Machine, space: BatchSpace) -> int:
        return sum(one.candidate.precision == "fp32" for one in searched(space, machine).asked)

    space, machine = two(2.0)
    refused = replace(machine, computes={"bf16": (1.5, 1.0)})
    assert asked_of_fp32(machine, space) == 2 < asked_of_fp32(refused, space)


@pytest.mark.parametrize(
    ("computes", "words"),
    [
        ((1.03, 1.0), "the loss is 1.03 where fp32 has 1"),
        ((1.0, 1.5), "the gradient norm is 1.5 times fp32's"),
        ((math.nan, 1.0), "the loss or gradient is not finite"),
    ],
)
def test_a_precision_that_computes_something_else_is_refused(computes: tuple[float, float], words: str) -> None:
    found = searched(*two(2.0, computes={"bf16": computes})).decision
    assert found.candidate.precision == "fp32"
    assert "measured 2.00 times as fast" in found.refusals["bf16"] and words in found.refusals["bf16"]


def test_a_precision_that_shares_no_size_with_the_reference_is_refused() -> None:
    """fp32 has room for 8 rows, below 16 bf16 fails."""

    class Apart(Machine):
        def measure(self, wanted: Proposal, budget: int | None) -> Measurement:
            point = wanted.candidate
            if point.precision == "fp32" and point.micro_batch_size > 8:
                return Measurement(point, "out_of_memory", reason="planted")
            if point.precision == "bf16" and point.micro_batch_size < 16:
                return Measurement(point, "error", reason="planted")
            return super().measure(wanted, budget)

    space, machine = two(4.0)
    space = replace(space, sizes=(4, 8, 16, 32), budget_bytes=None)
    bf16 = [Apart(machine.seconds).measure(Proposal(Candidate("bf16", size)), None) for size in (16, 32)]
    fp32 = [Apart(machine.seconds).measure(Proposal(Candidate("fp32", size)), None) for size in (4, 8)]
    decision = decide(space, SearchResults([*bf16, *fp32]))
    assert decision.candidate.precision == "fp32" and "no size was measured in fp32 too" in decision.refusals["bf16"]
    assert searched(space, Apart(machine.seconds)).decision.candidate.precision == "fp32", "it ends"


class Busy(Machine):
    """Other work on the machine while the first sizes of fp32 are timed."""

    def measure(self, wanted: Proposal, budget: int | None) -> Measurement:
        one = super().measure(wanted, budget)
        self.taken = getattr(self, "taken", 0) + 1
        slow = (4.0, 9.0, 6.0) if self.taken <= 2 else (1.0,) * 3
        return replace(one, pass_s=tuple(s * by for s, by in zip(one.pass_s, slow, strict=False)))


def test_times_measured_under_load_are_measured_again_and_not_used() -> None:
    space, quiet = two(0.7)
    busy = Busy(quiet.seconds)
    found, truth = searched(space, busy), searched(space, quiet)
    assert truth.decision.precision.value == found.decision.precision.value == "fp32"
    assert share_of_best(space, quiet, found) > 0.95


def test_a_gain_within_the_noise_keeps_the_reference() -> None:
    found = searched(*two(1.02))
    assert found.decision.candidate.precision == "fp32"


def test_a_hopeless_precision_is_dropped_after_two_sizes() -> None:
    found = searched(*two(0.5))
    asked = [one for one in found.asked if one.candidate.precision == "bf16"]
    assert len(asked) == 2


def test_one_precision_has_no_rival() -> None:
    space, machine = two(2.0)
    found = searched(replace(space, precisions=("bf16",)), machine)
    assert found.decision.candidate.precision == "bf16" and found.decision.refusals == {}


def test_results_survive_json() -> None:
    found = searched(*two(2.0)).results
    rows = [{"measured": [asdict(one)]} for one in found.measurements]
    rows += [{"measured": [asdict(one) for one in contest]} for contest in found.comparisons]
    rows.append({"trial": 9, "measurement": rows[0]["measured"][0]})  # as earlier versions wrote it
    assert SearchResults.of_rows(json.loads(json.dumps(rows))) == found


# ---------------------------------------------------------------- several devices, broken off


def test_idle_devices_get_measurements_that_can_run_concurrently() -> None:
    space, machine = two(2.0)
    space = replace(space, devices=4)
    first = next_proposals(space, SearchResults())
    assert [(one.candidate.precision, one.candidate.micro_batch_size) for one in first] == [
        ("fp32", 2), ("fp32", 16), ("bf16", 2), ("bf16", 16),
    ]  # fmt: skip
    assert next_proposals(space, SearchResults(), running=first) == []
    done = machine.measure(first[1], space.budget_bytes)
    assert next_proposals(space, SearchResults([done]), running=[first[0], *first[2:]]) == []
    both = [done, machine.measure(first[0], space.budget_bytes)]
    following = next_proposals(space, SearchResults(both), running=first[2:])
    assert [one.candidate.precision for one in following] == ["fp32"] and following[0] not in first


def test_in_any_order_of_results_the_decision_is_the_same() -> None:
    space, machine = two(2.0)
    found = searched(space, machine)
    shuffled = random.Random(1).sample(found.measurements, len(found.measurements))
    assert decide(space, SearchResults(shuffled, found.comparisons)) == found.decision


def test_a_search_that_was_broken_off_still_answers() -> None:
    space, machine = two(2.0)
    found = decide(space, SearchResults(searched(space, machine).measurements[:2]))
    assert found.candidate.precision == "fp32" and not found.complete


def test_a_decision_is_plain_values() -> None:
    row = json.loads(json.dumps(asdict(searched(*two(2.0)).decision)))
    assert row["candidate"]["precision"] == "bf16"
    timed = [one for one in row["table"] if one["rows_per_s"] is not None]
    assert all(one["low"] <= one["rows_per_s"] <= one["high"] for one in timed) and len(timed) >= 5


# ---------------------------------------------------------------- the space


def test_sizes_of_a_given_batch_divide_it() -> None:
    assert sizes_dividing(24, 2) == (1, 2, 3, 4, 6, 12) and sizes_dividing(7, 1) == (1, 7)
    assert sizes_dividing(10, 4) == (1, 2)
    assert sizes_free(100, 2) == (1, 2, 4, 8, 16, 32) and sizes_free(1, 4) == (1,)


@pytest.mark.parametrize(
    ("sizes", "first"), [((1,), (1,)), ((1, 2), (1, 2)), (POWERS, (2, 16)), ((3, 90), (3, 90)), ((5, 10, 20), (5, 20))]
)
def test_two_small_sizes_come_first(sizes: tuple[int, ...], first: tuple[int, ...]) -> None:
    assert BatchSpace(("fp32",), sizes, None, None).first_sizes() == first


# ---------------------------------------------------------------- in turn


class Slowed(Machine):
    """What is measured of one precision, before the contest, is hit by a slow stretch of the machine."""

    slowed, by, over = "fp32", 2.0, False

    def contend(self, wanted: Proposal) -> Measured:
        self.over = True
        return super().contend(wanted)

    def measure(self, wanted: Proposal, budget: int | None) -> Measurement:
        one = super().measure(wanted, budget)
        factor = self.by if wanted.candidate.precision == self.slowed and not self.over else 1.0
        return replace(one, pass_s=tuple(factor * seconds for seconds in one.pass_s))


@pytest.mark.parametrize(
    ("speed", "slowed", "by", "taken"),
    [(0.8, "fp32", 2.0, "fp32"), (1.6, "bf16", 2.0, "bf16"), (1.6, "fp32", 0.4, "bf16"), (0.8, "bf16", 0.4, "fp32")],
)
def test_a_slow_stretch_during_one_precision_does_not_decide(speed: float, slowed: str, by: float, taken: str) -> None:
    space, quiet = two(speed)
    machine = Slowed(quiet.seconds, update_s=0.0)
    machine.slowed, machine.by = slowed, by
    found = searched(space, machine)
    decision = found.decision
    assert decision.candidate.precision == taken, "as on a quiet machine"
    assert found.comparisons and f"{speed:.2f} " in decision.precision.reason
    truth = scores(space, quiet, taken)
    assert truth[decision.candidate.micro_batch_size] >= 0.95 * max(truth.values())
    assert decision.complete


def test_a_slow_stretch_of_the_whole_contest_changes_nothing() -> None:
    class Late(Machine):
        def contend(self, wanted: Proposal) -> Measured:
            quick = super().contend(wanted)
            return tuple(replace(one, pass_s=tuple(3 * s for s in one.pass_s)) for one in quick)

    space, quiet = two(1.6)
    found = searched(space, Late(quiet.seconds, update_s=0.0))
    assert found.decision.candidate == searched(space, quiet).decision.candidate and len(found.comparisons) == 1


def test_the_contenders_are_the_winner_its_runner_up_and_the_other_precision_and_each_is_timed_five_times() -> None:
    found = searched(*two(2.0))
    (asked,) = [one for one in found.asked if one.against]
    assert asked.candidate == found.decision.candidate
    assert sorted(one.precision for one in asked.against) == ["bf16", "fp32"]
    ((*contest,),) = found.comparisons
    rows = {Candidate(row.precision, row.micro_batch_size): row for row in found.decision.table}
    assert len(contest) == 3 and all(rows[one.candidate].passes >= 5 for one in contest)
    assert found.decision.candidate.micro_batch_size < POWERS[-1], "the knee, and not the largest"
    assert "measured in turn" in found.decision.micro_batch_size.reason


def test_a_contender_that_fails_ends_the_contest_and_is_out() -> None:
    space, machine = two(2.0)
    found = searched(space, machine)
    first, *others = found.comparisons[0]
    failed = (replace(first, outcome="out_of_memory", pass_s=()), *others)
    failing = SearchResults(found.measurements, [failed])
    decision = decide(space, failing)
    assert "in turn" not in decision.precision.reason and decision.candidate != first.candidate
    following = next_proposals(space, failing)
    assert all(one.candidate.micro_batch_size < first.candidate.micro_batch_size for one in following)


def test_if_fp32_does_not_fit_another_precision_is_chosen_without_a_comparison() -> None:
    class Large(Machine):
        def measure(self, wanted: Proposal, budget: int | None) -> Measurement:
            if wanted.candidate.precision == "fp32":
                return Measurement(wanted.candidate, "out_of_memory", reason="a peak of 12 GiB, the budget is 10 GiB")
            return super().measure(wanted, budget)

    space, machine = two(0.5)
    found = searched(space, Large(machine.seconds)).decision
    assert found.candidate.precision == "bf16"
    assert "bf16 could not be compared with it" in found.precision.reason


def test_a_precision_that_is_slower_in_one_round_is_not_chosen_by_the_median_alone() -> None:
    class Torn(Machine):
        """In the last round the machine does other work while bf16 has its turn."""

        def contend(self, wanted: Proposal) -> Measured:
            seen = super().contend(wanted)
            torn = [replace(one, pass_s=(*one.pass_s[:-1], 40 * one.pass_s[-1])) for one in seen]
            pairs = zip(seen, torn, strict=True)
            return tuple(late if one.candidate.precision == "bf16" else one for one, late in pairs)

    space, quiet = two(2.0)
    found = searched(space, Torn(quiet.seconds, update_s=0.0))
    decision = found.decision
    assert decision.candidate.precision == "fp32" and decision.complete
    assert "too noisy to tell them apart" in decision.refusals["bf16"]
    truth = scores(space, quiet, "fp32")
    assert truth[decision.candidate.micro_batch_size] >= 0.95 * max(truth.values()), "it was measured to its end"


class Shaky(Machine):
    """A machine that does other work: of three passes the second takes three times, the third half as long."""

    def measure(self, wanted: Proposal, budget: int | None) -> Measurement:
        one = super().measure(wanted, budget)
        return replace(one, pass_s=tuple(s * f for s, f in zip(one.pass_s, (1.0, 3.0, 0.5), strict=False)))


class ShakyInTurn(Shaky):
    """In a contest, too: in its last round the first contender has bad luck, by so much."""

    luck = (0.4, 1.0, 1.9)

    def contend(self, wanted: Proposal) -> Measured:
        first, *others = super().contend(wanted)
        torn = tuple(second * part for second, part in zip(first.pass_s, self.luck, strict=True))
        return (replace(first, pass_s=torn), *others)


def noisy_space() -> BatchSpace:
    return BatchSpace(("bf16", "fp32"), (1, 2, 4, 8, 16, 32, 64), 64, None)


def curves(gain: float) -> dict[str, Curve]:
    return {"fp32": lambda size: 0.02 + 0.001 * size, "bf16": lambda size: (0.02 + 0.001 * size) / gain}


def test_where_noise_hides_which_precision_is_faster_the_reference_stays_and_it_is_said() -> None:
    found = searched(noisy_space(), ShakyInTurn(curves(1.7))).decision
    assert found.candidate.precision == "fp32"
    assert "too noisy to tell them apart, so that fp32 stays" in found.precision.reason


def test_a_precision_that_wins_three_noisy_rounds_may_have_won_by_chance() -> None:
    class Waves(Shaky):
        def contend(self, wanted: Proposal) -> Measured:
            seen = super().contend(wanted)
            return tuple(
                replace(one, pass_s=tuple(s * f for s, f in zip(one.pass_s, (1.0, 3.0, 0.5), strict=True)))
                for one in seen
            )

    found = searched(noisy_space(), Waves(curves(1.5))).decision
    assert found.candidate.precision == "fp32"
    assert "too noisy to tell them apart" in found.precision.reason


def test_a_gain_beyond_the_noise_is_taken() -> None:
    found = searched(noisy_space(), ShakyInTurn(curves(9.0))).decision
    assert found.candidate.precision == "bf16" and "too noisy" not in found.precision.reason


def test_the_interval_of_a_noisy_rate_is_possible() -> None:
    for row in searched(noisy_space(), ShakyInTurn(curves(2.0))).decision.table:
        assert row.rows_per_s is not None and row.low is not None and row.high is not None
        assert 0 < row.low <= row.rows_per_s <= row.high < 10 * row.rows_per_s
