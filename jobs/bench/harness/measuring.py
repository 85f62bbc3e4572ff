"""How every bench measures: arms in alternating blocks of one run, a correctness gate, ratios with an interval.

A measurement is one JSON document: the settings, the machine, whether the arms compute the same results, all raw
values, and the ratios and claims derived from them. A difference is claimed only if the interval of the ratio excludes
1.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from cluster.environment import environment_record

LEVEL = 0.95
RESAMPLES = 4000
NO_DIFFERENCE = "no difference shown"


def alternate(arms: Mapping[str, Callable[[], float]], *, blocks: int, dropped: int = 1) -> dict[str, list[float]]:
    """Run one block of each arm in turn, the order reversed at every repetition, and return the values of each by
    repetition, without those of the `dropped` first ones (caches, allocators, optimizer state)."""
    values: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for repetition in range(dropped + blocks):
        for name in names if repetition % 2 == 0 else reversed(names):
            value = arms[name]()
            if repetition >= dropped:
                values[name].append(value)
    return values


@dataclass(frozen=True)
class Interval:
    """A median with its interval over bootstrap resamples; prints as "1.234 [1.200, 1.267]"."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        return f"{self.median:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def median_interval(values: Sequence[float]) -> Interval:
    """The median of `values` with its percentile bootstrap interval at `LEVEL`; the same for the same values."""
    sample = np.asarray(values, dtype=np.float64)
    if not len(sample):
        raise ValueError("an interval needs at least one value")
    draws = np.random.default_rng(0).integers(len(sample), size=(RESAMPLES, len(sample)))
    medians = np.median(sample[draws], axis=1)
    low, high = np.quantile(medians, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(np.median(sample)), float(low), float(high))


@dataclass(frozen=True)
class Goal:
    """The bound that a ratio should reach."""

    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        return f"at least {self.at_least}" if self.at_least is not None else f"at most {self.at_most}"


@dataclass(frozen=True)
class Ratio(Interval):
    """`of` / `to`, pair by pair."""

    name: str
    of: str
    to: str
    values: list[float]  # one for each repetition
    verdict: str  # "TO is faster" or "slower" than `of`, if the interval excludes 1
    goal: Goal | None = None
    met: bool | None = None  # whether the median reaches the goal


def compare(
    times: Mapping[str, Sequence[float]], *, of: str, to: str, name: str = "", goal: Goal | None = None,
    words: tuple[str, str] = ("faster", "slower"),
) -> Ratio:  # fmt: skip
    """The ratio of two arms' values, named "of / to" by default: above 1, `to` is the first of `words`, below 1 the
    second."""
    values = [a / b for a, b in zip(times[of], times[to], strict=True)]
    found = median_interval(values)
    excluded = found.low > 1 or found.high < 1
    verdict = f"{to} is {words[0] if found.low > 1 else words[1]}" if excluded else NO_DIFFERENCE
    met = None if goal is None else goal.met(found.median)
    return Ratio(**vars(found), name=name or f"{of} / {to}", of=of, to=to, values=values, verdict=verdict, goal=goal,
                 met=met)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One condition that must hold before the arms are compared."""

    name: str
    passed: bool
    detail: str


def equal_series(name: str, ours: Sequence[float], theirs: Sequence[float], *, relative: float = 0.0) -> Check:
    """Whether two series of losses agree, bit for bit or within a relative tolerance."""
    if len(ours) != len(theirs) or not ours:
        return Check(name, False, f"{len(ours)} losses against {len(theirs)}")
    worst = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))
    finite = all(value == value for value in (*ours, *theirs))
    wanted = "bit for bit" if relative == 0.0 else f"within {relative:g}"
    detail = f"{len(ours)} losses, largest relative difference {worst:.3g}, wanted {wanted}"
    return Check(name, finite and worst <= relative, detail)


@dataclass(frozen=True)
class Claim:
    """A claimed effect, and whether it was reproduced on this machine."""

    effect: str
    verdict: str  # "reproduced", "not reproduced" or "not measurable here"
    evidence: str


@dataclass
class BenchMeasurement:
    """The document of one bench; filled while it runs."""

    bench: str
    quick: bool
    settings: dict[str, Any]
    say: Callable[[str], None] = lambda text: None  # tells the person at the terminal what is being measured
    block: str = ""  # what one value of a variant measures
    unit: str = "s"
    checks: list[Check] = field(default_factory=list)
    arms: dict[str, list[float]] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # everything else that was measured
    advice: list[str] = field(default_factory=list)  # further printed lines
    picture: dict[str, Any] | None = None  # for `raytrain.report.plots.figure`, saved next to the document
    began: float = field(default_factory=time.time)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])

    def gate(self, check: Check) -> bool:
        """Add a condition; returns whether it holds."""
        self.checks.append(check)
        return check.passed

    def alternate(
        self, arms: Mapping[str, Callable[[], float]], *, blocks: int, dropped: int = 1, named: str = "{}"
    ) -> dict[str, list[float]]:
        """Run the arms in turn, see `alternate`; add their values under these names, and return them."""
        values = alternate(arms, blocks=blocks, dropped=dropped)
        self.arms |= {named.format(name): own for name, own in values.items()}
        return values

    def compare(self, times: Mapping[str, Sequence[float]], *, of: str, to: str, **about: Any) -> Ratio:
        """Add the ratio of two arms, see `compare`, and return it."""
        self.ratios.append(compare(times, of=of, to=to, **about))
        return self.ratios[-1]

    def claim(self, effect: str, holds: bool, evidence: str) -> None:
        """Add a claim with its verdict; with `--quick` sizes the verdict is always "not measurable here"."""
        verdict = "not measurable here" if self.quick else "reproduced" if holds else "not reproduced"
        self.claims.append(Claim(effect, verdict, f"{evidence}{'; --quick sizes' if self.quick else ''}"))

    def cannot(self, effect: str, why: str) -> None:
        """Add a claim that cannot be measured on this machine."""
        self.claims.append(Claim(effect, "not measurable here", why))
        self.gate(Check("what is needed", True, why))

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The document as plain values, without ratios and claims if the gate failed."""
        torch: Any = sys.modules.get("torch")  # not imported only for the number of threads
        return {
            "schema": 1,
            "bench": self.bench,
            "quick": self.quick,
            "settings": self.settings,
            "environment": {
                **environment_record(),
                "date": datetime.fromtimestamp(self.began, UTC).isoformat(timespec="seconds"),
                "command": shlex.join(["raytrain", *sys.argv[1:]]),
                "threads": torch.get_num_threads() if torch else None,
                "seconds": time.time() - self.began,
                "load_before": self.load_before,
                "load_after": os.getloadavg()[0],
            },
            "gate": {"passed": self.passed, "checks": [asdict(check) for check in self.checks]},
            "block": self.block,
            "arms": {
                name: {"unit": self.unit, "values": values, **asdict(median_interval(values))}
                for name, values in self.arms.items()
            },
            "ratios": [asdict(ratio) for ratio in self.ratios] if self.passed else [],
            "claims": [asdict(claim) for claim in self.claims] if self.passed else [],
            "values": self.values,
        }

    def lines(self) -> list[str]:
        shown = [f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.detail}" for check in self.checks]
        if not self.passed:
            return [*shown, "the gate failed: nothing is compared", *self.advice]
        for ratio in self.ratios:
            goal = "" if ratio.goal is None else f"; goal {ratio.goal}: {'met' if ratio.met else 'MISSED'}"
            shown.append(f"{ratio.name}: {ratio:.3f} over {len(ratio.values)} blocks, {ratio.verdict}{goal}")
        claims = [f"{claim.effect}: {claim.verdict} ({claim.evidence})" for claim in self.claims]
        return [*shown, *claims, *self.advice]


def matrix_units(flags: Mapping[str, bool]) -> str:
    """The CPU's instruction set for bfloat16 matrix products: "AMX", "AVX512-bf16" or "neither"."""
    return "AMX" if flags.get("amx_bf16") else "AVX512-bf16" if flags.get("avx512_bf16") else "neither"
