"""Expert hosts for a command: reserved before the workers, started, and written into the record. Driver side."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from experts.membership import ColocatedConnection, Connection
from raytrain.plan import Plan, Resolved
from raytrain.record import event
from raytrain.run_folder import RunFolder

SAY_EVERY_S = 10.0


def connect(
    plan: Plan, run: RunFolder, *, local: bool, interface: str | None, host_wait_s: float, say: Callable[[str], Any]
) -> Connection | None:
    """Start whoever owns the experts, before the workers take the machines; None where every worker holds them all.

    Args:
        local: the cluster is this machine alone, and everything stays on loopback.
        host_wait_s: `retry.host_wait_s`.
        say: told what is missing while the cluster has no room.
    """
    hosts = _value(plan.hosts)
    if hosts in ("none", 0):
        return None
    if hosts == "colocated":
        return ColocatedConnection(run_path=run.path, interface=interface, device=_value(plan.device))
    return _start(plan, run, local=local, interface=interface, host_wait_s=host_wait_s, say=say)


def _start(
    plan: Plan, run: RunFolder, *, local: bool, interface: str | None, host_wait_s: float, say: Callable[[str], Any]
) -> Connection:
    """Reserve the hosts' places, and have the directory start them; they come up while the workers do."""
    import ray
    import ray.exceptions

    from experts.connection import HostConnection
    from experts.directory import ExpertDirectory

    number, on_gpu = int(_value(plan.hosts)), _value(plan.device) == "cuda"
    threads = int(_value(plan.threads) or 1)
    group = None if local else _reserve(number, gpu=on_gpu, threads=threads, say=say)
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
            found = ray.get(directory.standing.remote())
        except ray.exceptions.RayError:  # the workers, who wait for the hosts, end with the reason
            return
        run.append_event(event("expert_hosts", hosts=found, seconds=time.perf_counter() - began, threads=threads))

    threading.Thread(target=record, daemon=True, name="expert-hosts").start()
    return HostConnection(directory=directory, run_path=run.path)


def _value(choice: Any) -> Any:
    assert isinstance(choice, Resolved)
    return choice.value


def _reserve(number: int, *, gpu: bool, threads: int, say: Callable[[str], Any]) -> Any:
    """A placement group of one bundle for each host, over as many nodes as there are."""
    import ray
    from ray.util.placement_group import placement_group

    bundle = {"GPU": 1} if gpu else {"CPU": threads}
    group = placement_group([dict(bundle) for _ in range(number)], strategy="SPREAD")
    while not group.wait(SAY_EVERY_S):
        free = ray.available_resources()
        have = ", ".join(f"{free.get(name, 0):g} {name}" for name in bundle)
        want = ", ".join(f"{number * amount:g} {name}" for name, amount in bundle.items())
        say(f"waiting for {want} for {number} expert hosts; {have} are free")
    return group
