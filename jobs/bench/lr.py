"""Bench `lr`: a learning-rate range test of a job. It suggests a rate; the job file is not changed.

The learning rate rises exponentially over a short run while the loss of each step is recorded. A good rate is where the
loss falls fastest; the test ends where the loss diverges. Method: L. N. Smith, "Cyclical learning rates for training
neural networks" (2017, https://arxiv.org/abs/1506.01186), with the smoothing and the stopping rule of fastai's
`lr_find`. It runs in this process, with the job's optimizer, precision, clipping and batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cluster.config import Positive, Text
from jobs.bench.harness.measuring import BenchMeasurement, Check
from jobs.bench.harness.options import BenchOptions, key
from jobs.bench.harness.sessions import restored_threads
from jobs.driver.local_session import session_of
from jobs.job.spec import LoadedSpec, load_spec, refuse_later
from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError, RunError
from raytrain.execution.reporter import SilentReporter
from raytrain.train.optim import Schedule

SETTLING = 0.05
"""Fraction of the ramp at its start in which the smoothed loss is still unstable; slopes there are ignored."""
MIN_STEPS = 3
MIN_FALL = 0.01
"""Without a fall of the smoothed loss by this fraction there is no suggestion."""


class LrOptions(BenchOptions):
    """Options of `raytrain bench lr JOB.yaml [section.key=value ...] [key=value ...]`."""

    job: Text | None = key(None, "a JOB.yaml or a recipe's name; null is the recipe default")
    changes: list[Text] = key([], "section.key=value overrides of the job, also as arguments")
    steps: int = key(150, "of the ramp", quick=20, ge=5)
    lowest: Positive = key(1e-6, "learning rate of the first step", quick=1e-4)
    highest: Positive = key(10.0, "learning rate of the last step")
    smoothing: float = key(0.9, "weight of earlier steps in the smoothed loss", ge=0, lt=1)
    divergence: float = key(2.0, "multiple of the lowest smoothed loss at which the ramp stops", gt=1)


@dataclass(frozen=True)
class Advice:
    """Learning rates read from a curve; None if the curve does not show one."""

    steepest: float | None  # where the smoothed loss falls fastest
    lowest: float | None  # where it is lowest
    diverged: float | None  # where the test stopped
    suggested: float | None  # `steepest`, but at most a tenth of `diverged`


def run(options: LrOptions, found: BenchMeasurement) -> None:
    if options.lowest >= options.highest:
        raise InputError("lowest", got=str(options.lowest), expected=f"below highest, {options.highest}")
    found.block = "one step of the ramp"
    changes = list(options.changes) + ([] if options.threads == "auto" else [f"scale.threads={options.threads}"])
    loaded = load_spec(None if options.job is None else Path(options.job), changes)
    refuse_later(loaded.spec, "bench")
    ramp = train_on_ramp(loaded, options, found)
    rates, losses, diverged = ramp.rates, ramp.losses, ramp.diverged
    if len(losses) < MIN_STEPS:
        raise RunError(f"the loss was not finite after {len(losses)} steps, at lr {diverged}; try a smaller lowest")
    smooth = smoothed(losses, options.smoothing)
    advice = advise(rates, smooth, diverged=diverged)
    found.gate(Check("the ramp was run", True, f"{len(losses)} of {options.steps} steps in {ramp.precision}"))
    own = loaded.spec.optim
    found.values |= {
        "optimizer": own.name, "precision": ramp.precision, "own_lr": own.lr, "lr": rates, "loss": losses,
        "smoothed": smooth, **vars(advice),
    }  # fmt: skip
    found.picture = curve_spec(loaded.spec.name, rates, losses, smooth, advice=advice, own=own.lr)
    found.advice = advice_lines(advice, own, options)


# ---------------------------------------------------------------- the ramp


class RampLog(SilentReporter):
    """Records the rate and the loss of each step, and the rate at which the loss diverged (the smoothed loss is far
    above its lowest value) or was not finite."""

    def __init__(self, options: LrOptions, precision: str) -> None:
        self._options, self.precision = options, precision
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.diverged: float | None = None

    def metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] != "train":
            return
        if math.isfinite(row["loss"]):
            self.rates.append(row["lr"])
            self.losses.append(row["loss"])
            smooth = smoothed(self.losses, self._options.smoothing)
            if smooth[-1] <= self._options.divergence * min(smooth):
                return
        self.diverged = self.diverged or row["lr"]


class Ramp(Schedule):
    """A learning rate that rises geometrically from `lowest` to `highest`; parameter groups keep their ratios."""

    def __init__(self, optim: OptimConfig, *, lr: float, lowest: float, highest: float, steps: int) -> None:
        super().__init__(optim, lr=lr, warmup_steps=0, max_steps=steps)
        self.lowest, self.rise = lowest, highest / lowest

    def factor(self, step: int) -> float:
        """The rate at `step` (1-based) as a multiple of the job's rate."""
        return self.lowest * self.rise ** ((step - 1) / max(1, self.max_steps - 1)) / self.peak


def train_on_ramp(loaded: LoadedSpec, options: LrOptions, found: BenchMeasurement) -> RampLog:
    """Train a session of the job until the ramp ends or the loss diverges. Restores torch's threads and random
    generators."""
    with restored_threads(), torch.random.fork_rng():
        session = session_of(loaded)
        precision = str(session.job.plan.precision.value_or("fp32"))
        session.prepare(precision)
        found.say(f"{options.steps} steps in {precision}, lr from {options.lowest:g} to {options.highest:g}")
        session.step.schedule = Ramp(
            session.job.optim, lr=session.step.schedule.peak, lowest=options.lowest, highest=options.highest,
            steps=options.steps,
        )  # fmt: skip
        log = RampLog(options, precision)
        loop = session.loop(reporter=log, should_stop=lambda: log.diverged is not None)
        loop.evaluate = None
        loop.limits = replace(loop.limits, max_steps=options.steps, log_every=1, eval_every=None, patience=None)
        loop.run(session.state)
    return log


# ---------------------------------------------------------------- the advice


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average with `weight` for earlier values, with bias correction."""
    average, found = 0.0, []
    for number, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        found.append(average / (1 - weight**number))
    return found


def advise(rates: Sequence[float], smooth: Sequence[float], *, diverged: float | None) -> Advice:
    bottom = min(range(len(smooth)), key=lambda index: smooth[index])
    begin = min(int(SETTLING * len(smooth)), bottom)
    slopes = {
        index: (smooth[index + 1] - smooth[index - 1]) / math.log(rates[index + 1] / rates[index - 1])
        for index in range(max(1, begin), min(bottom + 1, len(smooth) - 1))
    }
    if not slopes or smooth[bottom] > (1 - MIN_FALL) * smooth[0]:
        return Advice(None, None, diverged, None)
    steepest = rates[min(slopes, key=lambda index: slopes[index])]
    suggested = steepest if diverged is None else min(steepest, diverged / 10)
    return Advice(steepest, rates[bottom], diverged, suggested)


def advice_lines(advice: Advice, optim: OptimConfig, options: LrOptions) -> list[str]:
    if advice.suggested is None:
        return [f"no advice: the loss did not fall between {options.lowest:g} and {options.highest:g}"]
    ends = (
        f"diverges at {advice.diverged:.2g}" if advice.diverged is not None
        else f"did not diverge up to {options.highest:g}"
    )  # fmt: skip
    lines = [f"the loss falls fastest at lr {advice.steepest:.2g}, is lowest at {advice.lowest:.2g}, {ends}"]
    factor = advice.suggested / optim.lr
    change = "about the job's rate" if 0.5 <= factor <= 2.0 else f"{factor:.2g} times the job's {optim.lr:g}"
    return [*lines, f"suggested for {optim.name}: optim.lr={advice.suggested:.2g} ({change}); the job is unchanged"]


def curve_spec(
    name: str, rates: Sequence[float], losses: Sequence[float], smooth: Sequence[float], *, advice: Advice, own: float
) -> dict[str, Any]:
    """The plot: loss over learning rate, with marks at the suggested rate and the job's rate."""
    marks = []
    for label, at in (("suggested", advice.suggested), ("the job's", own)):
        if at is not None and rates[0] <= at <= rates[-1]:
            nearest = min(range(len(rates)), key=lambda index, at=at: abs(math.log(rates[index] / at)))
            marks.append({"x": at, "y": smooth[nearest], "text": f"{label} {at:.2g}"})
    series = [
        {"label": "train", "x": list(rates), "y": list(losses), "faint": True},
        {"label": "smoothed", "x": list(rates), "y": list(smooth)},
    ]
    fall = max(smooth[0] - min(smooth), 0.1 * abs(smooth[0]))
    shown = [min(losses) - 0.2 * fall, smooth[0] + fall]
    panel = {"title": "Loss", "x_label": "learning rate", "y_label": "loss", "kind": "line", "series": series,
             "marks": marks, "shown": shown}  # fmt: skip
    return {"title": f"{name}: learning-rate range test", "panels": [panel]}
