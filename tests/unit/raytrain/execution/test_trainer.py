"""How the end of Ray Train is explained: the loss of Ray itself is not a failure of the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
from lab import MLP, class_rows, make_job
from ray.train import TrainingFailedError

from raytrain.errors import ClusterLost, RunError
from raytrain.execution import trainer
from raytrain.execution.driver_channel import AttemptResult


def fitted(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> Any:
    """What `fit` makes of this result or error of `TorchTrainer.fit`."""

    class Played:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.return_value = outcome

        def fit(self) -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            return self

    channel = SimpleNamespace(keep=SimpleNamespace(remote=lambda name, value: None))
    monkeypatch.setattr(trainer, "trainer_class", lambda *, local: Played)
    job, _ = make_job(MLP, {"train": class_rows(64)})
    return trainer.fit(job, data=None, channel=channel, local=False, interface=None, storage="unused")


class Task(ray.exceptions.RayTaskError, ray.exceptions.RayActorError):
    """An actor's death, raised inside a call of the controller, which is alive."""

    def __init__(self) -> None:
        Exception.__init__(self, "planted")

    def __str__(self) -> str:
        return "planted in a call"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ray.exceptions.RayActorError(), ClusterLost, "controller process of Ray Train died"),
        (ray.exceptions.RaySystemError("socket closed"), ClusterLost, "connection to Ray was lost.*socket closed"),
        (ConnectionError("refused"), ClusterLost, "connection to Ray was lost.*refused"),
        (TrainingFailedError("workers failed"), RunError, "gave up: TrainingFailedError: workers failed"),
        (Task(), RunError, "gave up: Task: planted in a call"),
        (ray.exceptions.RuntimeEnvSetupError("no pip"), RunError, "gave up: RuntimeEnvSetupError"),
        (ValueError("wrong"), RunError, "gave up: ValueError: wrong"),
    ],
)
def test_only_the_loss_of_ray_starts_another_ray(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[RunError], words: str
) -> None:
    with pytest.raises(RunError, match=words) as raised:
        fitted(monkeypatch, error)
    assert type(raised.value) is kind


def test_the_result_of_rank_0_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitted(monkeypatch, AttemptResult("done", "3 steps")).reason == "3 steps"
    with pytest.raises(RunError, match="returned None instead of a result"):
        fitted(monkeypatch, None)
