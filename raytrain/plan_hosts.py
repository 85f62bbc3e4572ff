"""Plan rules about parts of a model that live outside the workers: how many hosts, and the strategy that follows.

Pure: the asked number, the `scale` section, the chosen machines and the inventory in, choices out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.inventory import Device, Inventory
from raytrain.config import LoopConfig, ScaleConfig
from raytrain.errors import InputError
from raytrain.plan_machines import Machines, is_named
from raytrain.plan_values import Choice, Deferred, Resolved
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
    if isinstance(asked, dict):
        _check_kinds(asked, machines, inventory, workers=workers)
    elif isinstance(asked, int):
        _check_room(asked, machines, inventory, workers=workers)
    return Resolved(asked, "experts.hosts")


def beside_hosts(workers: Resolved, asked: Any, scale: ScaleConfig, machines: Machines) -> Resolved:
    """`scale.workers: auto` on GPUs leaves one to each host that was asked for."""
    number = number_of_hosts(asked)
    if not machines.on_gpu or scale.workers != "auto" or not number or scale.strategy == "data_parallel":
        return workers
    left = len(machines.gpus) - sum(len(found) for found in _taken(asked, machines).values())
    if not 0 < left < workers.value:
        return workers
    return Resolved(left, f"one per GPU, of which {number} go to the expert hosts")


def choose_strategy(scale: ScaleConfig, hosts: Resolved) -> Resolved:
    """How the model is shared out over the workers."""
    if scale.strategy != "auto":
        return Resolved(scale.strategy, "scale.strategy")
    if hosts.value in ("none", 0):
        return Resolved("data_parallel", "every worker holds the whole model")
    return Resolved("expert_parallel", "each expert lives in one place; every worker holds the rest")


def separate(hosts: Choice) -> int:
    """Processes beside the workers."""
    return number_of_hosts(hosts.value) if isinstance(hosts, Resolved) else 0


def number_of_hosts(asked: Any) -> int:
    """Of a value of `experts.hosts`; 0 where they are no processes of their own."""
    return len(kinds_of_hosts(asked)) if isinstance(asked, dict) else asked if isinstance(asked, int) else 0


def kinds_of_hosts(asked: Any) -> list[str | None]:
    """The accelerator type of each host, in the order of the mapping; None where it is all the same."""
    if isinstance(asked, dict):
        return [kind for kind, number in asked.items() for _ in range(number)]
    return [None] * asked


def choose_inflight(
    asked: Any, loop: LoopConfig, *, hosts: Resolved, batches: Mapping[str, Resolved], warnings: list[str]
) -> Choice | None:
    """Micro-batches that each worker has under way to experts elsewhere; None where there are none elsewhere.

    Args:
        asked: `experts.inflight`.
        batches: as `choose_batches` says.

    Raises:
        InputError: two, where blocks are computed again in backward, naming both keys.
    """
    if hosts.value in ("none", 0):
        if asked == 2 and hosts.value == 0:
            warnings.append("experts.inflight 2 changes nothing: every worker holds all experts, and nothing travels")
        return None
    if asked == 2 and loop.activation_checkpointing:
        raise InputError(
            "experts.inflight", seen="2 with loop.activation_checkpointing true", expected="1 or auto with it",
            remedy="a block that is computed again in backward would draw out of order;"
            " loop.activation_checkpointing false keeps the activations of two micro-batches",
        )  # fmt: skip
    if asked != "auto":
        kept = "; the activations of two micro-batches are kept" if asked == 2 else ""
        return Resolved(asked, f"experts.inflight{kept}")
    if batches["accumulation"].value == 1:
        return Resolved(1, "one micro-batch a step: there is no other to compute while its rows travel")
    if loop.activation_checkpointing:
        return Resolved(1, "loop.activation_checkpointing computes blocks again in backward")
    return Deferred("measured with 1 and 2 at the start", (1, 2), "2 keeps the activations of two micro-batches")


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


def _taken(asked: Any, machines: Machines) -> dict[str, list[Device]]:
    """Of the GPUs that workers may have, those that go to hosts."""
    if not isinstance(asked, dict):
        return {"": machines.gpus[:asked]}
    return {kind: [gpu for gpu in machines.gpus if is_named(gpu, kind)][:number] for kind, number in asked.items()}


def _check_kinds(asked: dict[str, int], machines: Machines, inventory: Inventory, *, workers: int) -> None:
    there = f"there are: {inventory.describe()}"
    title = ", ".join(f"{number} {kind}" for kind, number in asked.items())
    if not machines.on_gpu:
        raise InputError(
            "experts.hosts", seen=title, expected="a number, as this run is on CPUs", remedy=f"{there}"
        )  # fmt: skip
    for kind, number in asked.items():
        mine = [node for node in inventory.nodes if any(is_named(device, kind) for device in node.devices)]
        have = sum(is_named(device, kind) for node in mine for device in node.devices)
        if have < number:
            expected = f"at most {have}" if have else "an accelerator type that is there"
            raise InputError("experts.hosts", seen=f"{number} {kind}", expected=expected, remedy=there)
        mixed = [node.host for node in mine if len({device.name for device in node.devices}) > 1]
        if mixed:
            raise InputError(
                "experts.hosts", seen=f"{number} {kind} with {mixed[0]}, which has GPUs of several kinds",
                expected="a number", remedy="Ray knows one accelerator type of a machine",
            )  # fmt: skip
    left = len(machines.gpus) - sum(map(len, _taken(asked, machines).values()))
    if workers > left:
        raise InputError(
            "experts.hosts", seen=f"{title} beside {workers} workers",
            expected=f"GPUs for the workers as well: {left} of {len(machines.gpus)} are left",
            remedy=f"lower experts.hosts or scale.workers; {there}",
        )  # fmt: skip


def _refuse_strategy(scale: ScaleConfig, what: str) -> None:
    if scale.strategy == "expert_parallel":
        raise InputError(
            "scale.strategy", seen=f"expert_parallel with {what}", expected="data_parallel or auto",
            remedy="experts.models:moe_gpt and experts.models:moe_mlp have experts",
        )  # fmt: skip
