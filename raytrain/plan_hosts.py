"""Plan rules about parts of a model that live outside the workers: how many hosts, and the strategy that follows.

Pure: the asked number, the `scale` section, the chosen machines and the inventory in, choices out.
"""

from __future__ import annotations

from typing import Any

from cluster.inventory import Inventory
from raytrain.config import ScaleConfig
from raytrain.errors import InputError
from raytrain.plan_machines import Machines
from raytrain.plan_values import Choice, Resolved
from raytrain.plan_workers import CPU_OVERLOAD

CPU_HOSTS = 2
"""On CPUs `auto` shows the whole machinery at work with the fewest processes that do."""


def choose_hosts(
    asked: Any, scale: ScaleConfig, machines: Machines, inventory: Inventory, *, workers: int
) -> Resolved:
    """"none" for a dense model, 0 for experts inside every worker, "colocated", or the number of separate hosts.

    Args:
        asked: `experts.hosts`, or None for a dense model.

    Raises:
        InputError: a contradiction, or hosts that these machines cannot give, naming the keys.
    """
    if asked is None:
        _refuse_strategy(scale, "a model without experts")
        return Resolved("none", "the model has no experts")
    if asked == 0:
        return Resolved(0, "every worker holds all experts")
    if scale.strategy == "data_parallel":
        if asked == "auto":
            return Resolved(0, "scale.strategy data_parallel: every worker holds all experts")
        raise InputError(
            "experts.hosts", seen=str(asked), expected="0 or auto with scale.strategy data_parallel",
            remedy="scale.strategy expert_parallel shares the experts out",
        )  # fmt: skip
    if asked == "auto":
        return _auto(machines, inventory)
    if isinstance(asked, int):
        _check_room(asked, machines, inventory, workers=workers)
    return Resolved(asked, "experts.hosts")


def choose_strategy(scale: ScaleConfig, hosts: Resolved) -> Resolved:
    """How the model is shared out over the workers."""
    if scale.strategy != "auto":
        return Resolved(scale.strategy, "scale.strategy")
    if hosts.value in ("none", 0):
        return Resolved("data_parallel", "every worker holds the whole model")
    return Resolved("expert_parallel", "each expert lives in one place; every worker holds the rest")


def separate(hosts: Choice) -> int:
    """Processes beside the workers."""
    return hosts.value if isinstance(hosts, Resolved) and isinstance(hosts.value, int) else 0


def _auto(machines: Machines, inventory: Inventory) -> Resolved:
    if not machines.on_gpu:
        if inventory.cpus < CPU_HOSTS:
            return Resolved(0, "one core: every worker holds all experts")
        return Resolved(CPU_HOSTS, "on CPUs two processes own the experts")
    if len(machines.gpus) == 1:
        return Resolved(0, "one GPU holds the whole model")
    return Resolved("colocated", f"{len(machines.gpus)} GPUs: each holds its share of the experts beside the rest")


def _check_room(asked: int, machines: Machines, inventory: Inventory, *, workers: int) -> None:
    there = f"there are: {inventory.describe()}"
    if machines.on_gpu and asked + workers > len(machines.gpus):
        raise InputError(
            "experts.hosts", seen=f"{asked} beside {workers} workers",
            expected=f"at most {max(0, len(machines.gpus) - workers)}, a GPU for each worker and each host",
            remedy=f"lower experts.hosts or scale.workers, or take experts.hosts colocated; {there}",
        )  # fmt: skip
    if not machines.on_gpu and asked > CPU_OVERLOAD * max(1, inventory.cpus):
        expected = f"at most {CPU_OVERLOAD * inventory.cpus}, {CPU_OVERLOAD} per CPU core"
        raise InputError("experts.hosts", seen=str(asked), expected=expected, remedy=there)


def _refuse_strategy(scale: ScaleConfig, what: str) -> None:
    if scale.strategy == "expert_parallel":
        raise InputError(
            "scale.strategy", seen=f"expert_parallel with {what}", expected="data_parallel or auto",
            remedy="experts.models:moe_gpt and experts.models:moe_mlp have experts",
        )  # fmt: skip
