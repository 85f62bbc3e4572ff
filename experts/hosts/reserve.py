"""Starts the expert hosts of a run on the driver: reserves their places before the workers', and records them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from experts.exchange.membership import ColocatedConnection, Connection
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.plan.rules.hosts import kinds_of_hosts
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import event

REPORT_EVERY_S = 10.0
TYPE_SHARE = 0.001
"""Amount of a node's accelerator-type resource to reserve; Ray itself uses the same."""


def connect(
    plan: Plan, run: RunFolder, *, local: bool, interface: str | None, host_wait_s: float, report: Callable[[str], Any]
) -> Connection | None:
    """Start the owners of the experts, before the workers take the machines; None where every worker holds all experts.

    Args:
        local: the cluster is this machine alone, and all connections stay on loopback.
        host_wait_s: `retry.host_wait_s`.
        report: called with a line about missing resources while the cluster has no room.
    """
    hosts = _value(plan.hosts)
    if hosts in ("none", 0):
        return None
    if hosts == "colocated":
        return ColocatedConnection(run_path=run.path, interface=interface, device=_value(plan.device))
    return _start(plan, run, local=local, interface=interface, host_wait_s=host_wait_s, report=report)


def _start(
    plan: Plan, run: RunFolder, *, local: bool, interface: str | None, host_wait_s: float, report: Callable[[str], Any]
) -> Connection:
    """Reserve the hosts' places, and have the directory start them while the workers start."""
    import ray
    import ray.exceptions

    from experts.hosts.connection import HostConnection
    from experts.hosts.directory import ExpertDirectory

    kinds, on_gpu = kinds_of_hosts(_value(plan.hosts)), _value(plan.device) == "cuda"
    number = len(kinds)
    threads = int(_value(plan.threads) or 1)
    group = None if local else _reserve(kinds, gpu=on_gpu, threads=threads, report=report)
    options = {"num_cpus": 0, "max_concurrency": 2 * int(_value(plan.workers)) + 4 * number + 8}
    actor: Any = ray.remote(ExpertDirectory)
    directory = actor.options(**options).remote(
        hosts=number, threads=threads, gpus=int(on_gpu), loopback=local, interface=interface, group=group,
        host_wait_s=host_wait_s,
    )  # fmt: skip
    directory.start.remote()
    began = time.perf_counter()

    def record() -> None:
        try:
            ready = ray.get(directory.ready_hosts.remote())
        except ray.exceptions.RayError:  # the workers wait for the hosts, and end with the reason
            return
        run.append_event(event("expert_hosts", hosts=ready, seconds=time.perf_counter() - began, threads=threads))

    threading.Thread(target=record, daemon=True, name="expert-hosts").start()
    return HostConnection(directory=directory, run_path=run.path)


def _value(choice: Any) -> Any:
    assert isinstance(choice, Resolved)
    return choice.value


def _reserve(kinds: Sequence[str | None], *, gpu: bool, threads: int, report: Callable[[str], Any]) -> Any:
    """Reserve a placement group of one bundle for each host, spread over the nodes.

    Args:
        kinds: accelerator type of each host; None for any.
    """
    import ray
    from ray.util.placement_group import placement_group

    bundles = [_bundle(kind, gpu=gpu, threads=threads) for kind in kinds]
    group = placement_group(bundles, strategy="SPREAD")
    want: Counter[str] = Counter()
    for bundle in bundles:
        want.update(bundle)
    while not group.wait(REPORT_EVERY_S):
        free = ray.available_resources()
        amounts = ", ".join(f"{amount:g} {name}" for name, amount in want.items() if amount >= 1)
        of_type = f" of type {', '.join(sorted({kind for kind in kinds if kind}))}" if any(kinds) else ""
        have = ", ".join(f"{free.get(name, 0):g} {name}" for name, amount in want.items() if amount >= 1)
        report(f"waiting for {amounts}{of_type} for {len(kinds)} expert hosts; {have} are free")
    return group


def _bundle(kind: str | None, *, gpu: bool, threads: int) -> dict[str, float]:
    """Resources of one host; a node has one unit of the resource that names its accelerator type."""
    if not gpu:
        return {"CPU": threads}
    return {"GPU": 1} if kind is None else {"GPU": 1, f"accelerator_type:{kind}": TYPE_SHARE}
