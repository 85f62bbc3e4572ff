"""A worker of bench `oom`: `python -m jobs.bench.training.oom_member SETTINGS.json RANK`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from jobs.bench.harness.processes import PAIR
from jobs.bench.harness.sessions import LossLog, SessionArm, serve_pair
from raytrain.trainable import LossOutput

VOCABULARY = 64


class OomWorker:
    """One of the two workers, with an undisturbed and a disturbed session."""

    def __init__(self, settings: dict[str, Any], rank: int) -> None:
        self._arms = {name: SessionArm(_job(settings), precision="fp64", reporter=OomLog())
                      for name in ("clean", "errors")}  # fmt: skip
        InjectedErrors(self._arms["errors"], [error for error in settings["errors"] if error["rank"] == rank])

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train all steps of both sessions in turn; returns their seconds, and what is compared of them."""
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


def _job(settings: dict[str, Any]) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(settings["seed"])
    rows = 8 * settings["batch"]
    tokens = torch.randint(VOCABULARY, (rows, settings["context"] + 1), generator=draw)
    data = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    model = {name: settings[name] for name in ("layers", "heads", "width", "context")}
    return {
        "name": "bench-oom",
        "seed": settings["seed"],
        "model": {"builder": "raytrain.models.gpt:gpt", **model, "vocab_size": VOCABULARY},
        "data": {"train": data, "eval_fraction": 0.0},
        "precision": {"dtype": "fp64"},
        "loop": {
            "max_steps": 1_000_000, "global_batch_size": settings["batch"], "log_every": 0,
            "micro_batch_size": settings["micro_batch"], "grow_after": settings["grow_after"],
        },
        "scale": {
            "workers": PAIR, "mode": "cpu",
            "threads": 1 if settings["threads"] == "auto" else settings["threads"],
        },
    }  # fmt: skip


class OomLog(LossLog):
    """A reporter that keeps the out-of-memory events too."""

    def __init__(self) -> None:
        super().__init__()
        self.shortages: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        """Keep an out-of-memory event."""
        if kind == "out_of_memory":
            self.shortages.append({"step": fields["step"], "who": fields["who"]})


class InjectedErrors:
    """Raises `torch.OutOfMemoryError` in a session, once at each place, as an allocator would."""

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
