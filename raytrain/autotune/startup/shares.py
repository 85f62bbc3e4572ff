"""`scale.shares: auto` on the real model: every worker's pace is measured once, and what follows is used by all."""

from __future__ import annotations

import socket

from raytrain.autotune.probe.worker_speed import measure_paces
from raytrain.autotune.search.shares import WorkerPace, choose_shares
from raytrain.autotune.startup.record import shared_record, write_decision
from raytrain.plan.choice import Deferred, Resolved
from raytrain.plan.rules.memory import moments
from raytrain.runs.folder import RunFolder
from raytrain.train.device import device_name
from raytrain.train.memory.device import process_budget
from raytrain.train.session import Session
from raytrain.train.state import Reporter


def resolve_shares(session: Session, run: RunFolder, *, reporter: Reporter) -> None:
    """Each worker's share of a batch, where the plan leaves it open; needs a prepared session. Collective.

    An attempt on the same machines, rank by rank, takes the shares that the first one measured, and sums in its order.
    """
    if not isinstance(session.job.plan.shares, Deferred):
        return
    workers, micro = session.workers, session.loader.batches.micro_batch
    place = f"{socket.gethostname()} {device_name(session.device)}"
    places = workers.all_gather_object(place)
    about = {"places": places, "micro_batch_size": micro}
    known = shared_record(session, run, "shares")
    if known is not None and known["trials"]["of"] == about:
        session.apply_choices(shares=Resolved(known["value"], known["reason"]))
        return
    chosen, paces = measure_shares(session, sizes_to_try(session, kinds=len({p.partition(" ")[2] for p in places})))
    session.apply_choices(shares=chosen)
    trials = {"of": about, "paces": [pace.to_json() for pace in paces]}
    if session.workers.rank == 0:
        write_decision(run, "shares", chosen, trials, reporter)


def measure_shares(session: Session, sizes: list[int]) -> tuple[Resolved, list[WorkerPace]]:
    """Shares by measured pace, from the first rows of the epoch; changes nothing it measures. Collective.

    Args:
        sizes: rows of a pass; the first is the micro-batch, and whoever has no room for another goes without.
    """
    batches, loader = session.loader.batches, session.loader
    order = batches.split.order(batches.seed, session.state.cursor.epoch)
    paces = measure_paces(
        session.step, lambda size: loader.one(order[:size]), sizes=sizes, workers=session.workers,
        device=session.device, room=_room(session) if len(sizes) > 1 else None,
    )  # fmt: skip
    return choose_shares(paces, total=batches.global_batch, micro_batch=sizes[0]), paces


def sizes_to_try(session: Session, *, kinds: int) -> list[int]:
    """Rows of a pass: on GPUs of several kinds each may have room for more than the smallest of them, unless the user
    says how many; what a search has found is the least that any kind takes."""
    batches, job = session.loader.batches, session.job
    given = job.loop.micro_batch_size != "auto" and job.found is None
    if kinds < 2 or session.device.type != "cuda" or given:
        return [batches.micro_batch]
    most = max(batches.micro_batch, batches.global_batch // session.workers.world_size)
    return [batches.micro_batch << power for power in range((most // batches.micro_batch).bit_length())]


def _room(session: Session) -> int | None:
    """Bytes for passes on this worker's device: its budget without the optimizer's state, which is not there yet."""
    cluster, device = session.job.cluster, session.device
    budget = process_budget(
        device, fraction=cluster.memory_fraction, limit=cluster.memory_limit, processes=session.sharing
    )
    trained = sum(p.numel() * p.element_size() for p in session.trainable.module.parameters() if p.requires_grad)
    return None if budget is None else budget - moments(session.job.optim) * trained
