"""The search over loader processes: whether there is anything to search, and what was chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.devices.inventory import Inventory
from jobs.job.spec import JobSpec
from jobs.tuning.batch.known import KnownMeasurements, with_noise_scale
from raytrain.autotune.search.batch_size import decide
from raytrain.autotune.search.loaders import LoaderRates, choose_count
from raytrain.autotune.search.measurement import Candidate
from raytrain.autotune.search.space import BatchSpace
from raytrain.errors import RunError
from raytrain.plan.choice import Choice, Deferred
from raytrain.plan.facts import DataFacts
from raytrain.plan.plan import Plan
from raytrain.plan.rules.devices import choose_devices
from raytrain.plan.rules.workers import spread

KEY = "data.loader_workers"
STREAMED = ("stream", "pinned")


@dataclass(frozen=True)
class LoaderSearch:
    """The counts to try: 0 to `most` for each worker. If it is None, nothing is searched; `reason` says why.

    Attributes:
        kept: keys to set in the trials' job: a single worker has more memory, and might cache rows that a run streams.
    """

    most: int | None
    reason: str = ""
    kept: dict[str, str] = field(default_factory=dict)

    def ask(self, space: BatchSpace, known: KnownMeasurements, goodput: bool) -> Candidate | None:
        """The chosen candidate if loader processes still have to be measured with it, else None."""
        if self.most is None:
            return None
        with contextlib.suppress(RunError):  # nothing can run: the decision says so at the end
            weighted = with_noise_scale(space, known, goodput=goodput)
            chosen = decide(weighted, known.measurements, known.gates, known.contests).candidate
            found = known.loaders
            is_known = found is not None and (found.candidate, found.most) == (chosen, self.most)
            return None if is_known else chosen
        return None


NONE = LoaderSearch(None)


def find_loaders(spec: JobSpec, plan: Plan, inventory: Inventory, facts: DataFacts) -> LoaderSearch:
    """The search space of `data.loader_workers: auto`: up to one process for each core of a worker."""
    storage, asked = str(plan.storage.value), spec.data.loader_workers  # type: ignore[union-attr]
    if asked != "auto":
        return LoaderSearch(None, f"{asked}, set by the job")
    if facts.kind != "items" or storage not in STREAMED:
        why = "part of the rows is cached" if storage == "partial" else plan.loader_workers.reason  # type: ignore[union-attr]
        return LoaderSearch(None, f"not searched, {why}")
    machines = choose_devices(spec.scale, inventory, [])
    counts = spread(int(plan.workers.value), machines, inventory)  # type: ignore[union-attr]
    shares = [node.cpus // counts[node.host] for node in inventory.nodes if counts.get(node.host)]
    if min(shares, default=1) < 1:
        return LoaderSearch(None, "not searched, since there are fewer cores than workers")
    return LoaderSearch(min(shares, default=1), kept={"data.storage": storage})


def chosen_loaders(loaders: LoaderSearch, measured: Iterable[LoaderRates | None]) -> Choice:
    """The chosen count: the largest of all kinds of devices, so that the fastest one does not wait; Deferred says why
    there is none."""
    if loaders.most is None:
        return Deferred(loaders.reason)
    found = [choose_count(one) for one in measured if one is not None]
    return max(found, key=lambda one: one.value) if found else Deferred("not measured: its trial failed")
