"""Experts of one inference worker: hosts of its own, which its process starts, and which end with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ray

from cluster.placement import on_this_node
from experts.exchange.membership import Membership
from experts.hosts.connection import join_directory
from experts.hosts.directory import ExpertDirectory
from experts.hosts.host import ProcessLimits
from experts.placement.starting import PlacementRules
from experts.shapes import LayerShape
from raytrain.config.sections import RetryConfig


@dataclass(frozen=True)
class HostsOfReplica:
    """What the hosts of every inference worker are started with.

    Attributes:
        hosts: of each worker.
        threads: of each host.
        gpus: of each host, 0 or 1.
        loopback, interface, dtype, limits: as for `ExpertDirectory`.
        retry: the limits of waiting for hosts.
        folder: of the job.
    """

    hosts: int
    threads: int
    gpus: int
    loopback: bool
    interface: str | None
    dtype: str
    limits: ProcessLimits
    retry: RetryConfig
    folder: str


class ReplicaConnection:
    """An inference worker's connection; implements `experts.exchange.membership.Connection`.

    In training the workers of a run share hosts, and call every operation together. Workers that answer take rows at
    their own pace, so each has hosts of its own, like the stages of a divided model. The directory is started by the
    first `join` and kept by later ones: after the death of a host only that one is started again. It ends with this
    process, which owns it, and its hosts with it.

    Its process must be the actor of bundle 0 of a placement group, which has a bundle for each host after it.
    """

    trains = False

    def __init__(self, about: HostsOfReplica) -> None:
        self._about = about
        self._directory: Any = None

    def close(self) -> None:
        """End the directory and the hosts that it owns."""
        if self._directory is not None:
            ray.kill(self._directory)
            self._directory = None

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[Any, Membership]:
        """See `Connection`; nothing is trained, and experts stay where they are."""
        self._directory = self._directory or self._start()
        rules = replace(rules, every=None, trains=False)
        return join_directory(self._directory, shapes, rules, rank=0, workers=1, run_path=self._about.folder)

    def _start(self) -> Any:
        from ray.util.placement_group import get_current_placement_group

        about = self._about
        options = {"num_cpus": 0, "max_concurrency": 4 * about.hosts + 10, "scheduling_strategy": on_this_node()}
        actor: Any = ray.remote(ExpertDirectory)
        directory = actor.options(**options).remote(
            hosts=about.hosts, threads=about.threads, gpus=about.gpus, loopback=about.loopback,
            interface=about.interface, group=get_current_placement_group(), first_bundle=1,
            host_wait_s=about.retry.host_wait_s, host_silence_s=about.retry.host_silence_s, dtype=about.dtype,
            limits=about.limits,
        )  # fmt: skip
        directory.start.remote()
        return directory
