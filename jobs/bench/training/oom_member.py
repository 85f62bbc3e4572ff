"""A worker of bench `oom`: `python -m jobs.bench.training.oom_member SETTINGS.json RANK`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from jobs.bench.harness.inputs import draw_tokens, gpt_model, job_of
from jobs.bench.harness.processes import PAIR
from jobs.bench.harness.sessions import LossLog, SessionArm, serve_pair
from jobs.bench.training.oom import OomOptions
from raytrain.trainable import LossOutput

VOCABULARY = 64


class OomWorker:
    """One of the two workers, with a session without and a session with errors."""

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        job = _job(OomOptions(**settings["options"]))
        self._arms = {name: SessionArm(job, precision="fp64", reporter=OomLog()) for name in ("clean", "errors")}
        InjectedErrors(self._arms["errors"], [error for error in settings["errors"] if error["rank"] == rank])

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train all steps of both sessions in turn; returns their seconds and results."""
        arms, sizes = self._arms, []
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for step in range(request["steps"]):
            for name in arms if step % 2 else reversed(arms):
                seconds[name].append(arms[name].run(1))
            sizes.append(arms["errors"].session.loader.micro_batch)
        clean, disturbed = (arm.session.trainable.module.state_dict() for arm in arms.values())
        reporter = arms["errors"].reporter
        assert isinstance(reporter, OomLog)
        return {
            "seconds": seconds,
            "sizes": sizes,
            "events": reporter.shortages,
            "largest_difference": max(float((clean[name] - value).abs().max()) for name, value in disturbed.items()),
            "digest": hashlib.sha256(b"".join(value.numpy().tobytes() for value in disturbed.values())).hexdigest(),
        }


def _job(options: OomOptions) -> dict[str, Any]:
    data = draw_tokens(8 * options.batch, options.context, vocabulary=VOCABULARY, seed=options.seed)
    loop = {
        "global_batch_size": options.batch, "log_every": 0, "micro_batch_size": options.micro_batch,
        "grow_after": options.grow_after,
    }  # fmt: skip
    return job_of(
        options, gpt_model(options, vocab_size=VOCABULARY), data, name="oom", loop=loop, workers=PAIR,
        threads=1 if options.threads == "auto" else options.threads, precision={"dtype": "fp64"},
    )  # fmt: skip


class OomLog(LossLog):
    """A reporter that also records out-of-memory events."""

    def __init__(self) -> None:
        super().__init__()
        self.shortages: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        """Record an out-of-memory event."""
        if kind == "out_of_memory":
            self.shortages.append({"step": fields["step"], "who": fields["who"]})


class InjectedErrors:
    """Raises `torch.OutOfMemoryError` in a session, once for each planned error, as an allocator would."""

    def __init__(self, arm: SessionArm, errors: list[dict[str, Any]]) -> None:
        self._session, self._errors = arm.session, {error["step"]: error for error in errors}
        self._inner = arm.session.trainable.loss
        self._step = self._count = 0
        arm.session.trainable.loss = self._loss

    def _loss(self, module: Any, batch: Any, **count: Any) -> LossOutput:
        step = self._session.state.step + 1
        self._step, self._count = step, self._count + 1 if step == self._step else 0
        output = self._inner(module, batch, **count)
        error = self._errors.get(step)
        if error is not None and self._count == error["micro_batch"]:
            del self._errors[step]
            if not error["backward"]:
                raise torch.OutOfMemoryError(f"injected in the forward of step {step}")
            output.loss.register_hook(lambda _gradient: _raise_in_backward(step))
        return output


def _raise_in_backward(step: int) -> Tensor:
    raise torch.OutOfMemoryError(f"injected in the backward of step {step}")


if __name__ == "__main__":
    serve_pair("oom", lambda settings, rank: OomWorker(settings, rank).answer)
