"""A trial of the search over batch size and precision: one measurement, in its own process and on its own device.

It is one worker without Ray Train, experts in-process; `train` confirms the result in the real process group.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import ray
import ray.exceptions
import torch
from ray import cloudpickle, tune

from jobs.tuning.batch.trials import TrialRequest
from raytrain.autotune.probe.gradient_noise import measure_norms
from raytrain.autotune.probe.loaders import measure_loaders
from raytrain.autotune.probe.run_proposal import run_proposal
from raytrain.autotune.probe.step import StepProbe
from raytrain.autotune.search.noise_scale import noise_scale
from raytrain.autotune.startup.confirm import signature_of
from raytrain.config.user_code import import_from
from raytrain.data.sources.open import source_from_driver
from raytrain.execution.driver_channel import on_stop_request
from raytrain.train.job import TrainJob
from raytrain.train.memory.allocator import keep_freed_memory
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session

FREED_S = 20.0
"""Seconds to wait for the memory of an earlier trial's process to be released."""


@dataclass(frozen=True)
class BatchTrialSettings:
    """The settings that every trial of a sweep receives.

    Attributes:
        job: reference to the pickled TrainJob of one worker (it may name the user's classes).
        data: reference to data given as objects, or None.
        folder: working directory of the command, from which users' code is imported.
        prepared: the precision to prepare the session in; it has the master dtype of all candidates.
        reference: the precision that the numeric gate compares with.
        budgets: kind of device -> bytes that a process may use there; None if unknown.
        workers: number of workers of the run that the figures are for.
        goodput: whether the noise scale decides, or is only advice.
        channel: the `DriverChannel` actor through which the driver asks trials to exit.
    """

    job: Any
    data: Any
    folder: str
    prepared: str
    reference: str
    budgets: dict[str, int | None]
    workers: int
    goodput: bool
    channel: Any


def batch_trial(config: dict[str, Any], *, settings: BatchTrialSettings) -> None:
    """Ray Tune's trainable: reports {"measurement"}, {"gate"}, {"contest"}, {"noise"}, {"loaders"}, a contest with the
    measurement of its winner's peak if requested. Running out of memory is a measurement, not an error."""
    keep_freed_memory()
    on_stop_request(settings.channel, lambda: os._exit(1))  # an unfinished measurement is useless
    if os.path.isdir(settings.folder):
        os.chdir(settings.folder)
    import_from(settings.folder)
    wanted = TrialRequest.of(config)
    job: TrainJob = cloudpickle.loads(ray.get(settings.job))
    data: Any = None if settings.data is None else ray.get(settings.data)
    if job.planned("device") == "cuda":
        await_freed_memory(torch.device("cuda", 0))
    source = source_from_driver(data, job.data, context=job.model.keys.get("context"))
    session = Session(job, workers=Workers(), source=source)
    session.prepare(settings.prepared)
    tune.report(_measured(session, wanted, settings))


def _measured(session: Session, wanted: TrialRequest, settings: BatchTrialSettings) -> dict[str, Any]:
    if wanted.noise:
        size = wanted.candidate.micro_batch_size
        few = (
            {} if settings.goodput else {"micro_batches": 4, "draws": 6}
        )  # advice need not be as precise as a decision
        pairs = measure_norms(session, micro_batch_size=size, **few)
        return {"noise": asdict(noise_scale(pairs))}
    if wanted.loaders is not None:
        found = measure_loaders(StepProbe(session), wanted.candidate, most=wanted.loaders, passes=wanted.passes)
        return {"loaders": found.to_json()}
    taken = run_proposal(
        StepProbe(session), wanted.proposal, reference=settings.reference, budget=settings.budgets[wanted.kind]
    )
    found = {name: part.to_json() for name, part in vars(taken).items() if part is not None}
    return {**found, "signature": signature_of(session, workers=settings.workers).to_json()}


def await_freed_memory(device: torch.device) -> None:
    """Wait until the memory of a process that ended is released: until the free memory stops growing."""
    ends = time.monotonic() + FREED_S
    free, _ = torch.cuda.mem_get_info(device)
    while time.monotonic() < ends:
        time.sleep(0.25)
        now, _ = torch.cuda.mem_get_info(device)
        if now <= free:
            return
        free = now
