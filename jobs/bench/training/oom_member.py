"""A worker of bench `oom`: `python -m jobs.bench.training.oom_member SETTINGS.json RANK`."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jobs.bench.harness.sessions import Losses, SessionArm
from jobs.bench.training.oom import WORKERS
from raytrain.train.memory.allocator import keep_freed_memory
from raytrain.trainable import LossOutput

VOCABULARY = 64


def main(path: str, rank: int) -> None:
    """Take the steps, write what was found."""
    settings = json.loads(Path(path).read_text())
    keep_freed_memory()
    folder = Path(settings["folder"])
    store = dist.FileStore(str(folder / "store"), WORKERS)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    arms = {name: SessionArm(_job(settings), precision="fp64", reporter=Told()) for name in ("clean", "errors")}
    own = [error for error in settings["errors"] if error["rank"] == rank]
    Planted(arms["errors"], own)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    sizes = []
    for step in range(settings["blocks"] * settings["steps_between"]):
        for name in arms if step % 2 else reversed(arms):
            seconds[name].append(arms[name].run(1))
        sizes.append(arms["errors"].session.loader.micro_batch)
    states = [arm.session.trainable.module.state_dict() for arm in arms.values()]
    reporter = arms["errors"].reporter
    assert isinstance(reporter, Told)
    found = {
        "seconds": seconds,
        "sizes": sizes,
        "events": reporter.shortages,
        "largest_difference": max(float((states[0][name] - value).abs().max()) for name, value in states[1].items()),
        "digest": hashlib.sha256(b"".join(value.numpy().tobytes() for value in states[1].values())).hexdigest(),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


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
            "workers": WORKERS, "mode": "cpu",
            "threads": 1 if settings["threads"] == "auto" else settings["threads"],
        },
    }  # fmt: skip


class Told(Losses):
    """Keeps the events of memory that ran out."""

    def __init__(self) -> None:
        super().__init__()
        self.shortages: list[dict[str, Any]] = []

    def event(self, kind: str, **fields: Any) -> None:
        """One row."""
        if kind == "out_of_memory":
            self.shortages.append({"step": fields["step"], "who": fields["who"]})


class Planted:
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
                raise torch.OutOfMemoryError(f"planted in the forward of step {step}")
            output.loss.register_hook(lambda _gradient: _refuse(step))
        return output


def _refuse(step: int) -> Tensor:
    raise torch.OutOfMemoryError(f"planted in the backward of step {step}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
