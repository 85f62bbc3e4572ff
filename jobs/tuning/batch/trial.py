"""A trial of the search over batch size and precision: one measurement, in a process and on a device of its own.

It is one worker without Ray Train, experts in-process; `train` confirms what is found in the real group.
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
from raytrain.config.user_code import make_importable
from raytrain.data.sources.open import source_from_driver
from raytrain.execution.driver_channel import on_stop_request
from raytrain.train.job import TrainJob
from raytrain.train.memory.allocator import keep_freed_memory
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session

FREED_S = 20.0
"""The memory of an earlier trial's process is released within this many seconds, or never."""


@dataclass(frozen=True)
class BatchOrders:
    """The settings that every trial of a sweep receives.

    Attributes:
        job: reference to the pickled TrainJob of one worker (it may name the user's classes).
        data: reference to handed-over data, or None.
        folder: the directory of the command, where users' code is.
        prepared: the precision to prepare in, which has the master format of all candidates.
        reference: the precision that a gate compares with.
        budgets: kind of device -> what a process may take there; None: nobody knows.
        workers: of the run that the figures are for.
        goodput: the noise scale decides, and is not advice alone.
        channel: the `DriverChannel` actor by which the driver has trials leave.
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


def batch_trial(config: dict[str, Any], *, orders: BatchOrders) -> None:
    """Ray Tune's trainable: reports {"measurement"}, {"gate"}, {"contest"}, {"noise"}, {"loaders"}, a contest with the
    measurement of its winner's peak where that was wanted; running out of memory is a measurement."""
    keep_freed_memory()
    on_stop_request(orders.channel, lambda: os._exit(1))  # an unfinished measurement is worth nothing
    if os.path.isdir(orders.folder):
        os.chdir(orders.folder)
    make_importable(orders.folder)
    wanted = TrialRequest.of(config)
    job: TrainJob = cloudpickle.loads(ray.get(orders.job))
    data: Any = None if orders.data is None else ray.get(orders.data)
    if job.planned("device") == "cuda":
        await_freed_memory(torch.device("cuda", 0))
    source = source_from_driver(data, job.data, context=job.model.keys.get("context"))
    session = Session(job, workers=Workers(), source=source)
    session.prepare(orders.prepared)
    tune.report(_measured(session, wanted, orders))


def _measured(session: Session, wanted: TrialRequest, orders: BatchOrders) -> dict[str, Any]:
    if wanted.noise:
        size = wanted.candidate.micro_batch_size
        few = {} if orders.goodput else {"micro_batches": 4, "draws": 6}  # an advice need not be as sure as a choice
        pairs = measure_norms(session, micro_batch_size=size, **few)
        return {"noise": asdict(noise_scale(pairs))}
    if wanted.loaders is not None:
        found = measure_loaders(StepProbe(session), wanted.candidate, most=wanted.loaders, passes=wanted.passes)
        return {"loaders": found.to_json()}
    taken = run_proposal(
        StepProbe(session), wanted.proposal, reference=orders.reference, budget=orders.budgets[wanted.kind]
    )
    found = {name: part.to_json() for name, part in vars(taken).items() if part is not None}
    return {**found, "signature": signature_of(session, workers=orders.workers).to_json()}


def await_freed_memory(device: torch.device) -> None:
    """Wait until a process that ended has given its memory back: until what is free no longer grows."""
    ends = time.monotonic() + FREED_S
    free, _ = torch.cuda.mem_get_info(device)
    while time.monotonic() < ends:
        time.sleep(0.25)
        now, _ = torch.cuda.mem_get_info(device)
        if now <= free:
            return
        free = now
