"""Sessions for benches: the product's own step and loop in this process, without Ray, advanced in blocks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from jobs.driver.checks import check_on_driver, train_job
from jobs.job.spec import load_spec
from jobs.plan import plan_job
from raytrain.autotune.startup.precision import measure_precision
from raytrain.execution.reporter import SilentReporter
from raytrain.plan.choice import Deferred
from raytrain.plan.plan import Plan
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session


def session_of(job: Mapping[str, Any], *, connection: Any = None) -> tuple[Session, Plan]:
    """The session that a worker of this job would hold, and the plan it obeys; nothing is prepared yet.

    Args:
        connection: to whoever holds the experts (`experts.exchange.membership.Connection`); None builds them in this
            process.
    """
    loaded = load_spec(mapping=job)
    checked = check_on_driver(loaded.spec)
    plan = plan_job(loaded, model_facts=checked.model_facts, data_facts=checked.data_facts)
    run = RunFolder(os.path.join(loaded.spec.save.dir, loaded.spec.name))  # a name only: nothing is written there
    orders = train_job(loaded.spec, plan, run, attempt=1)
    if connection is not None:
        experts = orders.builder_sections["experts"].connected(connection)
        orders = replace(orders, builder_sections={**orders.builder_sections, "experts": experts})
    return Session(orders, workers=Workers(), source=checked.source), plan


class SessionArm:
    """A prepared session as an arm: `run(steps)` takes that many more and returns its seconds."""

    def __init__(self, job: Mapping[str, Any], *, precision: str, reporter: Losses | None = None) -> None:
        self.session, self.plan = session_of(job)
        self.session.prepare(precision)
        self.reporter = reporter or Losses()
        self.loop = self.session.loop(reporter=self.reporter, should_stop=_never)

    @property
    def losses(self) -> list[float]:
        """Of every logged step."""
        return self.reporter.losses

    def run(self, steps: int) -> float:
        """Advance; ends with a logged row, so that the device has caught up."""
        self.loop.limits = replace(self.loop.limits, max_steps=self.session.state.step + steps)
        began = time.perf_counter()
        self.loop.run(self.session.state)
        return time.perf_counter() - began


def chosen_precision(job: Mapping[str, Any]) -> tuple[str, str, list[dict[str, Any]]]:
    """What `precision.dtype: auto` takes for this job on this machine: (value, reason, trials)."""
    session, plan = session_of({**job, "precision": {"dtype": "auto"}})
    if not isinstance(plan.precision, Deferred):
        return str(plan.precision.value), plan.precision.reason, []
    session.prepare("fp32")
    chosen, trials = measure_precision(session, list(plan.precision.bounds))
    return str(chosen.value), chosen.reason, trials


def _never() -> bool:
    return False


class Losses(SilentReporter):
    """Keeps the losses of logged steps, and the peak of bytes that each of them had."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.peaks: list[int] = []

    def metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] == "train":
            self.losses.append(row["loss"])
            self.peaks.append(row["peak_memory_bytes"])


class SavedForBackward:
    """Counts the bytes that autograd keeps between forward and backward, parameters left out, each storage once."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._kept: dict[int, torch.UntypedStorage] = {}  # held until counted, so that no address comes twice
        self.bytes = 0

    def during(self, forward: Callable[[], Any]) -> int:
        """Run `forward`, keep its result alive while counting, and return the bytes."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            result = forward()
        self.bytes = sum(storage.nbytes() for storage in self._kept.values())
        del result
        self._kept.clear()
        return self.bytes

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._kept[storage.data_ptr()] = storage
        return tensor
