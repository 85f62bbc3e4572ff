"""`scale.shares: auto` on the real model: the shares of a batch that follow from every worker's measured speed."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

from raytrain.autotune.probe.worker_speed import measure_worker_speeds
from raytrain.autotune.search.shares import WorkerSpeed, choose_shares
from raytrain.autotune.startup.choice import DeferredChoice, Record, record_of
from raytrain.plan.choice import Resolved
from raytrain.plan.rules.memory import moments
from raytrain.plan.shares import shares_of
from raytrain.train.device import device_name
from raytrain.train.memory.device import process_budget
from raytrain.train.session import Session


class SharesChoice(DeferredChoice):
    """Each worker's share of a batch; needs a prepared session with its micro-batch.

    An attempt whose ranks are on the same machines uses the shares that the first one measured, and so sums in its
    order.
    """

    name = "shares"

    def settings(self) -> dict[str, Any]:
        """Host and device of every rank, and the micro-batch."""
        place = f"{socket.gethostname()} {device_name(self.session.device)}"
        places = self.session.workers.all_gather_object(place)
        return {"places": places, "micro_batch_size": self.session.loader.batches.micro_batch}

    def settings_of(self, known: Record) -> dict[str, Any]:
        """The same when it was measured."""
        return known["trials"]["of"]

    def shown(self, record: Record) -> tuple[str, str] | None:
        """That the shares are unequal, if they are."""
        return None if record["value"] == "equal" else ("shares", "unequal")

    def measure(self, settings: dict[str, Any]) -> Record:
        """See `measure_shares`."""
        kinds = len({place.partition(" ")[2] for place in settings["places"]})
        chosen, paces = measure_shares(self.session, sizes_to_try(self.session, kinds=kinds))
        return record_of(chosen, {"of": settings, "paces": [pace.to_json() for pace in paces]})

    def apply(self, record: Record) -> None:
        """Divide each batch by these shares."""
        self.session.use(replace(self.session.settings, shares=shares_of(record["value"])))


def measure_shares(session: Session, sizes: list[int]) -> tuple[Resolved, list[WorkerSpeed]]:
    """Shares by measured speed, from the first rows of the epoch; changes nothing that it measures. Collective.

    Args:
        sizes: rows of a pass. The first is the micro-batch; a worker without memory for another one skips it.
    """
    batches, loader = session.loader.batches, session.loader
    order = batches.split.order(batches.seed, session.state.cursor.epoch)
    paces = measure_worker_speeds(
        session.step, lambda size: loader.one(order[:size]), sizes=sizes, workers=session.workers,
        device=session.device, room=_room(session) if len(sizes) > 1 else None,
    )  # fmt: skip
    return choose_shares(paces, total=batches.global_batch_size, micro_batch=sizes[0]), paces


def sizes_to_try(session: Session, *, kinds: int) -> list[int]:
    """Rows of a pass: on GPUs of several kinds each may have memory for more than the smallest of them has, unless the
    user gives a number; what a search found is the least over all kinds."""
    batches, job = session.loader.batches, session.job
    given = job.loop.micro_batch_size != "auto" and job.found is None
    if kinds < 2 or session.device.type != "cuda" or given:
        return [batches.micro_batch]
    most = max(batches.micro_batch, batches.global_batch_size // session.workers.world_size)
    return [batches.micro_batch << power for power in range((most // batches.micro_batch).bit_length())]


def _room(session: Session) -> int | None:
    """Bytes for passes on this worker's device: its budget less the optimizer's state, which is not allocated yet."""
    cluster, device = session.job.cluster, session.device
    budget = process_budget(
        device, fraction=cluster.memory_fraction, limit=cluster.memory_limit, processes=session.sharing
    )
    trained = sum(p.numel() * p.element_size() for p in session.trainable.module.parameters() if p.requires_grad)
    return None if budget is None else budget - moments(session.job.optim) * trained
