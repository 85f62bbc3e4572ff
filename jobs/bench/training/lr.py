"""Bench `lr`: a learning-rate range test of a job. Advice: nothing of the job is changed or written.

The learning rate rises exponentially over a short run while the loss of each step is kept; where the loss falls
fastest is a good rate, and where it leaves for good is too much. Method: L. N. Smith, "Cyclical learning rates for
training neural networks" (2017, https://arxiv.org/abs/1506.01186), with the smoothing and the stop of fastai's
`lr_find`. The job's own optimizer, precision, clip and batches are used, in a session of its own, in this process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from jobs.bench.harness.measuring import BenchMeasurement, Check, Say
from jobs.bench.harness.options import LrOptions
from jobs.bench.harness.sessions import session_of
from jobs.job.spec import load_spec, refuse_later
from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError, RunError
from raytrain.execution.reporter import SilentReporter
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.optim.build import Schedule
from raytrain.train.session import Session

SETTLING = 0.05
"""Part of the ramp at whose start the smoothed loss still jumps; no slope is read there."""
FEWEST = 3
LEAST_FALL = 0.01
"""The smoothed loss has to fall by this part somewhere, or nothing was learned that advice could rest on."""


@dataclass(frozen=True)
class Advice:
    """What a curve says; None where it does not.

    Attributes:
        steepest: learning rate at which the smoothed loss falls fastest. lowest: at which it is least.
        diverged: at which the test stopped.
        suggested: the steepest, but at most a tenth of where it diverged.
    """

    steepest: float | None
    lowest: float | None
    diverged: float | None
    suggested: float | None


def run(options: LrOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Take the ramp; see `LrOptions`.

    Raises:
        InputError: what is wrong with the job, or a ramp that does not rise.
        RunError: the loss was not finite from the first steps on.
    """
    if options.lowest >= options.highest:
        raise InputError("lowest", seen=str(options.lowest), expected=f"below highest, {options.highest}")
    found = BenchMeasurement("lr", quick, options.model_dump(), "one step of the ramp")
    changes = list(options.changes) + ([] if options.threads == "auto" else [f"scale.threads={options.threads}"])
    loaded = load_spec(None if options.job is None else Path(options.job), changes)
    refuse_later(loaded.spec, "bench")
    with _as_it_was():
        session, plan = session_of(loaded.mapping)
        precision = str(plan.precision.value_or("fp32"))
        session.prepare(precision)
        say(f"{options.steps} steps in {precision}, lr from {options.lowest:g} to {options.highest:g}")
        rates, losses, diverged = take_ramp(session, options)
    if len(losses) < FEWEST:
        raise RunError(f"the loss was not finite after {len(losses)} steps, at lr {diverged}; try a smaller lowest")
    smooth = smoothed(losses, options.smoothing)
    advice = advise(rates, smooth, diverged=diverged)
    found.gate(Check("the ramp was taken", True, f"{len(losses)} of {options.steps} steps in {precision}"))
    own = loaded.spec.optim
    found.values |= {
        "optimizer": own.name, "precision": precision, "own_lr": own.lr, "lr": rates, "loss": losses,
        "smoothed": smooth, "steepest": advice.steepest, "lowest": advice.lowest, "diverged": advice.diverged,
        "suggested": advice.suggested,
    }  # fmt: skip
    found.picture = curve_spec(loaded.spec.name, rates, losses, smooth, advice=advice, own=own.lr)
    found.advice = told(advice, own, options)
    return found


class Ramp(Schedule):
    """From `lowest` to `highest` by equal factors; parameter groups keep the ratios between their rates."""

    def __init__(self, optim: OptimConfig, *, lr: float, lowest: float, highest: float, steps: int) -> None:
        super().__init__(optim, lr=lr, warmup_steps=0, max_steps=steps)
        self.lowest, self.rise = lowest, highest / lowest

    def factor(self, step: int) -> float:
        """Share of the job's own rate at `step` (1-based)."""
        return self.lowest * self.rise ** ((step - 1) / max(1, self.max_steps - 1)) / self.peak


def take_ramp(session: Session, options: LrOptions) -> tuple[list[float], list[float], float | None]:
    """(learning rates, the loss of each step, the rate at which it diverged or None) of a prepared session."""
    schedule = session.step.schedule
    steps = {"lowest": options.lowest, "highest": options.highest, "steps": options.steps}
    session.step.schedule = Ramp(session.job.optim, lr=schedule.peak, **steps)
    watch = _Watch(options)
    loop = session.loop(reporter=watch, should_stop=lambda: watch.diverged is not None)
    loop.evaluate = None
    loop.limits = replace(loop.limits, max_steps=options.steps, log_every=1, eval_every=None, patience=None)
    loop.run(session.state)
    return watch.rates, watch.losses, watch.diverged


class _Watch(SilentReporter):
    """Keeps what each step says, and notices divergence: a smoothed loss far above the least one, or none at all."""

    def __init__(self, options: LrOptions) -> None:
        self._options = options
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


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Afterwards this process's threads and random generators are as they were."""
    threads, generators = torch.get_num_threads(), rng_state(torch.device("cpu"))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        set_rng_state(generators, torch.device("cpu"))


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average that gives what is past `weight`, corrected for its start."""
    average, found = 0.0, []
    for number, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        found.append(average / (1 - weight**number))
    return found


def advise(rates: Sequence[float], smooth: Sequence[float], *, diverged: float | None) -> Advice:
    """What a curve of smoothed losses over rising rates says."""
    bottom = min(range(len(smooth)), key=lambda index: smooth[index])
    begin = min(int(SETTLING * len(smooth)), bottom)
    slopes = {
        index: (smooth[index + 1] - smooth[index - 1]) / math.log(rates[index + 1] / rates[index - 1])
        for index in range(max(1, begin), min(bottom + 1, len(smooth) - 1))
    }
    if not slopes or smooth[bottom] > (1 - LEAST_FALL) * smooth[0]:
        return Advice(None, None, diverged, None)
    steepest = rates[min(slopes, key=lambda index: slopes[index])]
    suggested = steepest if diverged is None else min(steepest, diverged / 10)
    return Advice(steepest, rates[bottom], diverged, suggested)


def told(advice: Advice, optim: OptimConfig, options: LrOptions) -> list[str]:
    """For people, in a few lines."""
    if advice.suggested is None:
        return [f"no advice: the loss did not fall between {options.lowest:g} and {options.highest:g}"]
    ends = (
        f"diverges at {advice.diverged:.2g}" if advice.diverged is not None
        else f"did not diverge up to {options.highest:g}"
    )  # fmt: skip
    lines = [f"the loss falls fastest at lr {advice.steepest:.2g}, is least at {advice.lowest:.2g}, {ends}"]
    apart = advice.suggested / optim.lr
    same = 0.5 <= apart <= 2.0
    said = "about what it is" if same else f"{apart:.2g} times the job's {optim.lr:g}"
    return [*lines, f"suggested for {optim.name}: optim.lr={advice.suggested:.2g} ({said}); the job is left as it is"]


def curve_spec(
    name: str, rates: Sequence[float], losses: Sequence[float], smooth: Sequence[float], *, advice: Advice, own: float
) -> dict[str, Any]:
    """The picture: loss over learning rate, with the suggestion and the job's own rate marked on the curve."""
    marks = [
        {"x": at, "y": smooth[nearest(rates, at)], "text": f"{word} {at:.2g}"}
        for word, at in (("suggested", advice.suggested), ("the job's", own))
        if at is not None and rates and rates[0] <= at <= rates[-1]
    ]
    series = [
        {"label": "train", "x": list(rates), "y": list(losses), "faint": True},
        {"label": "smoothed", "x": list(rates), "y": list(smooth)},
    ]
    fall = max(smooth[0] - min(smooth), 0.1 * abs(smooth[0]))
    shown = [min(losses) - 0.2 * fall, smooth[0] + fall]
    panel = {"title": "Loss", "x_label": "learning rate", "y_label": "loss", "kind": "line", "series": series,
             "marks": marks, "shown": shown}  # fmt: skip
    return {"title": f"{name}: learning-rate range test", "panels": [panel]}


def nearest(rates: Sequence[float], at: float) -> int:
    """The place of the rate that is nearest to `at` by its logarithm."""
    return min(range(len(rates)), key=lambda index: abs(math.log(rates[index] / at)))
