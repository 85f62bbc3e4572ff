"""Ray Tune's schedulers, which stop trials early whose evaluations are worse than others' at equal steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, TrialScheduler

from jobs.tuning.space.points import LOOKS, Points


@dataclass(frozen=True)
class EndedTrial:
    """The attributes of a trial that a scheduler reads."""

    trial_id: str


class PatientMedian(MedianStoppingRule):
    """Ray's rule without its pauses: a paused run would start its processes again."""

    def _on_insufficient_samples(self, tune_controller: Any, trial: Any, time: float) -> str:
        return TrialScheduler.CONTINUE


def scheduler_of(name: str, points: Points, *, curves: Mapping[int, Sequence[tuple[int, float]]]) -> Any:
    """The scheduler of this name (`tune.scheduler`); None for "none".

    Args:
        curves: (step, loss) of the evaluations of trials that have ended, by trial; passed to the scheduler first, so
            that a resumed search decides as if it had not been interrupted.
    """
    most = max((one.max_steps or 0 for one in points.trials), default=0) or 10**9
    first = max(1, most // LOOKS)
    compare: dict[str, Any] = {"time_attr": "step", "metric": "eval_loss", "mode": "min"}
    if name == "asha":  # at max_t it would stop a trial before the trial reports its result
        scheduler: Any = ASHAScheduler(max_t=most + 1, grace_period=first, reduction_factor=2, **compare)
    elif name == "median":
        scheduler = PatientMedian(grace_period=first, min_samples_required=2, **compare)
    else:
        return None
    for trial, losses in curves.items():
        ended = EndedTrial(f"ended {trial}")
        scheduler.on_trial_add(None, ended)
        for step, loss in losses:
            scheduler.on_trial_result(None, ended, {"step": step, "eval_loss": loss})
    return scheduler
