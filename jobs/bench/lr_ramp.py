"""The training run of bench `lr`: steps of a job with an exponentially rising learning rate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from jobs.bench.harness.measuring import Say
from jobs.bench.harness.sessions import restored_threads
from jobs.driver.local_session import session_of
from jobs.job.spec import LoadedSpec
from raytrain.config.sections import OptimConfig
from raytrain.execution.reporter import SilentReporter
from raytrain.train.device import rng_state, set_rng_state
from raytrain.train.optim import Schedule
from raytrain.train.session import Session


def run_ramp(
    loaded: LoadedSpec, *, lowest: float, highest: float, steps: int, has_diverged: Callable[[Sequence[float]], bool],
    say: Say,
) -> tuple[list[float], list[float], float | None, str]:  # fmt: skip
    """(learning rates, the loss of each step, the rate at which it diverged or None, the precision) of a session of
    the job. Restores torch's threads and random generators of this process.

    Args:
        has_diverged: decides after each step whether the ramp stops, from all losses so far.
    """
    with restored_threads(), _restored_generators():
        session = session_of(loaded)
        precision = str(session.job.plan.precision.value_or("fp32"))
        session.prepare(precision)
        say(f"{steps} steps in {precision}, lr from {lowest:g} to {highest:g}")
        schedule = Ramp(session.job.optim, lr=session.step.schedule.peak, lowest=lowest, highest=highest, steps=steps)
        return *train_on_ramp(session, schedule, has_diverged), precision


class Ramp(Schedule):
    """A learning rate that rises geometrically from `lowest` to `highest`; parameter groups keep their ratios."""

    def __init__(self, optim: OptimConfig, *, lr: float, lowest: float, highest: float, steps: int) -> None:
        super().__init__(optim, lr=lr, warmup_steps=0, max_steps=steps)
        self.lowest, self.rise = lowest, highest / lowest

    def factor(self, step: int) -> float:
        """The rate at `step` (1-based) as a multiple of the job's rate."""
        return self.lowest * self.rise ** ((step - 1) / max(1, self.max_steps - 1)) / self.peak


def train_on_ramp(
    session: Session, schedule: Ramp, has_diverged: Callable[[Sequence[float]], bool]
) -> tuple[list[float], list[float], float | None]:
    """(learning rates, the loss of each step, the rate at which it diverged or None) of a prepared session."""
    session.step.schedule = schedule
    log = _RampLog(has_diverged)
    loop = session.loop(reporter=log, should_stop=lambda: log.diverged is not None)
    loop.evaluate = None
    loop.limits = replace(loop.limits, max_steps=schedule.max_steps, log_every=1, eval_every=None, patience=None)
    loop.run(session.state)
    return log.rates, log.losses, log.diverged


class _RampLog(SilentReporter):
    """Records the rate and the loss of each step, and the rate at which it diverged or was not finite."""

    def __init__(self, has_diverged: Callable[[Sequence[float]], bool]) -> None:
        self._has_diverged = has_diverged
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.diverged: float | None = None

    def metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] != "train":
            return
        if math.isfinite(row["loss"]):
            self.rates.append(row["lr"])
            self.losses.append(row["loss"])
            if not self._has_diverged(self.losses):
                return
        self.diverged = self.diverged or row["lr"]


@contextlib.contextmanager
def _restored_generators() -> Iterator[None]:
    generators = rng_state(torch.device("cpu"))
    try:
        yield
    finally:
        set_rng_state(generators, torch.device("cpu"))
