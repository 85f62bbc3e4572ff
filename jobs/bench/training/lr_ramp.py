"""The run of bench `lr`: some steps of a job while its learning rate rises exponentially."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from jobs.bench.harness.measuring import Say
from jobs.bench.harness.sessions import restored_threads
from jobs.bench.training.lr import LrOptions, smoothed
from jobs.driver.session import session_of
from jobs.job.spec import LoadedSpec
from raytrain.config.sections import OptimConfig
from raytrain.execution.reporter import SilentReporter
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.optim.build import Schedule
from raytrain.train.session import Session


def run_ramp(loaded: LoadedSpec, options: LrOptions, *, say: Say) -> tuple[list[float], list[float], float | None, str]:
    """(learning rates, the loss of each step, the rate at which it diverged or None, the precision) of a session of
    the job; this process's threads and random generators are restored afterwards."""
    with restored_threads(), _restored_generators():
        session = session_of(loaded)
        precision = str(session.job.plan.precision.value_or("fp32"))
        session.prepare(precision)
        say(f"{options.steps} steps in {precision}, lr from {options.lowest:g} to {options.highest:g}")
        return *train_on_ramp(session, options), precision


class Ramp(Schedule):
    """A learning rate from `lowest` to `highest` by equal factors; parameter groups keep the ratios of their rates."""

    def __init__(self, optim: OptimConfig, *, lr: float, lowest: float, highest: float, steps: int) -> None:
        super().__init__(optim, lr=lr, warmup_steps=0, max_steps=steps)
        self.lowest, self.rise = lowest, highest / lowest

    def factor(self, step: int) -> float:
        """Share of the job's own rate at `step` (1-based)."""
        return self.lowest * self.rise ** ((step - 1) / max(1, self.max_steps - 1)) / self.peak


def train_on_ramp(session: Session, options: LrOptions) -> tuple[list[float], list[float], float | None]:
    """(learning rates, the loss of each step, the rate at which it diverged or None) of a prepared session."""
    schedule = session.step.schedule
    steps = {"lowest": options.lowest, "highest": options.highest, "steps": options.steps}
    session.step.schedule = Ramp(session.job.optim, lr=schedule.peak, **steps)
    log = _RampLog(options)
    loop = session.loop(reporter=log, should_stop=lambda: log.diverged is not None)
    loop.evaluate = None
    loop.limits = replace(loop.limits, max_steps=options.steps, log_every=1, eval_every=None, patience=None)
    loop.run(session.state)
    return log.rates, log.losses, log.diverged


class _RampLog(SilentReporter):
    """Keeps the rate and the loss of each step, and notices divergence: a smoothed loss far above the lowest one, or a
    loss that is not finite."""

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


@contextlib.contextmanager
def _restored_generators() -> Iterator[None]:
    generators = rng_state(torch.device("cpu"))
    try:
        yield
    finally:
        set_rng_state(generators, torch.device("cpu"))
