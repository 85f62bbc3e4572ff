"""Bench `lr`: a learning-rate range test of a job. Advice: nothing of the job is changed or written.

The learning rate rises exponentially over a short run while the loss of each step is kept; where the loss falls
fastest is a good rate, and where it leaves for good is too much. Method: L. N. Smith, "Cyclical learning rates for
training neural networks" (2017, https://arxiv.org/abs/1506.01186), with the smoothing and the stop of fastai's
`lr_find`. The job's own optimizer, precision, clip and batches are used, in a session of its own, in this process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from cluster.config import Positive, Text
from jobs.bench.harness.measuring import BenchMeasurement, Check, Say
from jobs.bench.harness.options import BenchOptions
from jobs.job.spec import load_spec, refuse_later
from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError, RunError

SETTLING = 0.05
"""Part of the ramp at whose start the smoothed loss still jumps; no slope is read there."""
FEWEST = 3
LEAST_FALL = 0.01
"""The smoothed loss has to fall by this part somewhere, or nothing was learned that advice could rest on."""


class LrOptions(BenchOptions):
    """A learning-rate range test: `raytrain bench lr JOB.yaml [section.key=value ...] [key=value ...]`."""

    MEASURES: ClassVar[str] = (
        "learning-rate range test of JOB.yaml: the loss over a rising learning rate, and a suggested rate"
    )
    QUICK: ClassVar[dict[str, Any]] = {"steps": 20, "lowest": 1e-4}
    IN_ALL: ClassVar[bool] = False

    job: Text | None = Field(None, description="a JOB.yaml or a recipe's name; null is the recipe default")
    changes: list[Text] = Field([], description="section.key=value over the job, also as arguments")
    steps: Annotated[int, Field(ge=5)] = Field(150, description="of the ramp")
    lowest: Positive = Field(1e-6, description="learning rate of the first step")
    highest: Positive = Field(10.0, description="learning rate of the last step")
    smoothing: float = Field(0.9, ge=0, lt=1, description="weight of the past in the smoothed loss")
    divergence: float = Field(2.0, gt=1, description="times the least smoothed loss, at which the ramp stops")


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
    from jobs.bench.training.lr_ramp import run_ramp

    if options.lowest >= options.highest:
        raise InputError("lowest", seen=str(options.lowest), expected=f"below highest, {options.highest}")
    found = BenchMeasurement("lr", quick, options.model_dump(), "one step of the ramp")
    changes = list(options.changes) + ([] if options.threads == "auto" else [f"scale.threads={options.threads}"])
    loaded = load_spec(None if options.job is None else Path(options.job), changes)
    refuse_later(loaded.spec, "bench")
    rates, losses, diverged, precision = run_ramp(loaded, options, say=say)
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
