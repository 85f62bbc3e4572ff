"""A session on one device, in this process, without Ray."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.driver.check_job import check_on_driver, train_job
from jobs.driver.planning import plan_job
from jobs.job.spec import load_spec
from raytrain.plan.choice import Resolved
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session

sys.path.insert(0, str(Path(__file__).resolve().parent))  # `lines`


@pytest.fixture
def tiny_job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Session]:
    """`tiny_job(device=, steps=, storage=, compile=, evaluate=)`: a small classifier whose loss falls within a few
    steps."""

    def build(
        *, device: str, steps: int, storage: str = "resident", compile: str = "off", evaluate: bool = False
    ) -> Session:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(256, 16, generator=generator)
        labels = (x @ torch.randn(16, 4, generator=generator)).argmax(-1)
        loaded = load_spec(
            mapping={
                "model": {"builder": "raytrain.models.mlp:mlp", "hidden": [64], "num_features": 16, "num_classes": 4},
                "data": {"train": {"x": x, "labels": labels}, "eval_fraction": 0.25 * evaluate, "storage": storage},
                "loop": {"max_steps": steps, "log_every": 1, "global_batch_size": 64, "compile": compile}
                | ({"eval_every": 4} if evaluate else {}),
                "optim": {"lr": 1e-2},
                "scale": {"mode": "cpu", "threads": 1},
                "telemetry": {"tensorboard": False},
            }
        )
        checked = check_on_driver(loaded.spec)
        plan = plan_job(loaded, model_facts=checked.model_facts, data_facts=checked.data_facts)
        plan = replace(plan, device=Resolved(device, "this test"))
        run = RunFolder.create(str(tmp_path_factory.mktemp("runs")), "tiny")
        return Session(train_job(loaded.spec, plan, run, attempt=1), workers=Workers())

    return build
