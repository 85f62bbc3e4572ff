"""The search over loader processes: whether the job leaves them open and a run would have any, and what it found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.devices.inventory import Inventory
from jobs.job.spec import JobSpec
from jobs.tuning.batch.known import Known, weighed
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
    """Counts that may be tried: 0 to `most` for each worker; `most` None: none are, and `reason` says why.

    Attributes:
        kept: keys of the trials' job: one worker alone has more memory, and might keep what the run will stream.
    """

    most: int | None
    reason: str = ""
    kept: dict[str, str] = field(default_factory=dict)

    def ask(self, space: BatchSpace, known: Known, goodput: bool) -> Candidate | None:
        """The candidate with which processes are still to be measured, once it is chosen; None: none are."""
        if self.most is None:
            return None
        with contextlib.suppress(RunError):  # nothing can run: the decision says so at the end
            weighted = weighed(space, known, goodput=goodput)
            chosen = decide(weighted, known.measurements, known.gates, known.contests).candidate
            found = known.loaders
            is_known = found is not None and (found.candidate, found.most) == (chosen, self.most)
            return None if is_known else chosen
        return None


NONE = LoaderSearch(None)


def find_loaders(spec: JobSpec, plan: Plan, inventory: Inventory, facts: DataFacts) -> LoaderSearch:
    """What a search may try for `data.loader_workers: auto`: up to one process for each core of a worker."""
    storage, asked = str(plan.storage.value), spec.data.loader_workers  # type: ignore[union-attr]
    if asked != "auto":
        return LoaderSearch(None, f"{asked}, given")
    if facts.kind != "items" or storage not in STREAMED:
        why = "a part of the rows is kept" if storage == "partial" else plan.loader_workers.reason  # type: ignore[union-attr]
        return LoaderSearch(None, f"not searched, {why}")
    machines = choose_devices(spec.scale, inventory, [])
    counts = spread(int(plan.workers.value), machines, inventory)  # type: ignore[union-attr]
    shares = [node.cpus // counts[node.host] for node in inventory.nodes if counts.get(node.host)]
    if min(shares, default=1) < 1:
        return LoaderSearch(None, "not searched, there are fewer cores than workers")
    return LoaderSearch(min(shares, default=1), kept={"data.storage": storage})


def chosen_loaders(loaders: LoaderSearch, measured: Iterable[LoaderRates | None]) -> Choice:
    """The answer, of several kinds of devices the largest of theirs, so that the fastest waits for nothing; Deferred
    says why there is none."""
    if loaders.most is None:
        return Deferred(loaders.reason)
    found = [choose_count(one) for one in measured if one is not None]
    return max(found, key=lambda one: one.value) if found else Deferred("not measured: its trial did not end well")
