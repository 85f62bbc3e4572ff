"""Accelerator types by the names that people, drivers and Ray give them, and the peaks of their data sheets. Pure.

A person writes `h100`, the driver says `NVIDIA H100 80GB HBM3`, and Ray requires the resource `accelerator_type:H100`,
spelled exactly so: a worker that requires any other spelling waits forever.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cluster.devices.inventory import Device, Inventory, Node
from raytrain.errors import InputError

PEAKS = ("fp32", "tf32", "bf16", "fp16", "memory")

GPUS = {
    "B200": (75, 1100, 2250, 2250, 7.7), "H200 NVL": (60, 418, 835, 835, 4.8), "H200": (67, 494, 989, 989, 4.8),
    "H100 NVL": (60, 418, 835, 835, 3.9), "H100 PCIE": (51, 378, 756, 756, 2.0), "H100": (67, 494, 989, 989, 3.35),
    "A100": (19.5, 156, 312, 312, 1.55), "L40S": (91.6, 183, 362, 362, 0.86), "A40": (37.4, 74.8, 150, 150, 0.7),
    "A10": (31.2, 62.5, 125, 125, 0.6), "L4": (30.3, 60, 121, 121, 0.3), "V100": (15.7, 15.7, 15.7, 125, 0.9),
    "T4": (8.1, 8.1, 8.1, 65, 0.32), "4090": (82.6, 82.6, 165, 165, 1.0), "3090": (35.6, 35.6, 71, 71, 0.94),
    "MI300X": (163, 654, 1307, 1307, 5.3),
}  # fmt: skip
"""Neighbouring words of a GPU's name -> 1e12 FLOPs per second of dense products in each format of `PEAKS`, and 1e12
bytes per second of its memory; longer names of a kind come first. From the data sheets of NVIDIA (which give sparse
products of H100, H200 and B200, twice as fast), its white papers (4090, 3090: sums in fp32) and AMD. Formats that a
GPU has no units for are computed in fp32. The A100's memory is that of 40 GB."""


def is_named(device: Device, text: str) -> bool:
    """Whether `text` is the device's name or some neighbouring words of it, in any case: H100 and rtx-pro-6000 match
    'NVIDIA H100 80GB HBM3' and 'NVIDIA RTX PRO 6000 Blackwell'."""
    return _contains(device.name, text)


def of_type(node: Node, device: Device, text: str) -> bool:
    """Whether a device of this node is of the type that `text` names: by its own name, or by Ray's names of the node,
    where no device of the node has such a name (Ray knows AMD's products, the kernel driver only their chips)."""
    if any(is_named(one, text) for one in node.devices):
        return is_named(device, text)
    return any(_contains(name, text) for name in node.accelerators)


def of_ray(inventory: Inventory) -> bool:
    """Whether these are the nodes of a running Ray cluster, which assigns the devices itself."""
    return any(node.gpu_slots is not None or node.accelerator for node in inventory.nodes)


def ray_type(text: str, nodes: Sequence[Node], inventory: Inventory, *, key: str) -> str | None:
    """Ray's spelling of the accelerator type that `text` names; None where no type has to be required, as all GPUs of
    the cluster are of it. Without a cluster, `text` itself.

    Args:
        nodes: those that have a device of this type.
        key: the key that names the type.

    Raises:
        InputError: the nodes have several such types, or Ray knows none of them.
    """
    if not of_ray(inventory):
        return text
    exact = {name for node in nodes for name in node.accelerators if name.casefold() == text.casefold()}
    near = {name for node in nodes for name in _matching(node, text) or node.accelerators[:1]}
    names = sorted(exact or near)
    if len(names) == 1:
        return names[0]
    if names:
        raise InputError(
            key, got=text, expected=f"one type, {' or '.join(names)}", remedy="Ray requires one type for a process"
        )
    others = [node.host for node in inventory.nodes if node.devices and node not in nodes]
    if not others and all(of_type(node, device, text) for node in nodes for device in node.devices):
        return None
    hosts = ", ".join(node.host for node in nodes)
    raise InputError(
        key, got=text, expected="a type that Ray knows",
        remedy=f"Ray names no type on {hosts}: start Ray there with --resources"
        f" '{{\"accelerator_type:{text}\": 1}}'; available: {inventory.describe()}",
    )  # fmt: skip


def _matching(node: Node, text: str) -> list[str]:
    return [name for name in node.accelerators if _contains(name, text)]


def _contains(name: str, text: str) -> bool:
    """Whether the words of `text` are neighbouring words of `name`."""
    words, wanted = _words(name), _words(text)
    places = range(len(words) - len(wanted) + 1)
    return bool(wanted) and any(words[place : place + len(wanted)] == wanted for place in places)


def _words(text: str) -> list[str]:
    return re.findall(r"[0-9a-z]+", text.casefold())


def peak_of(name: str, what: str) -> float | None:
    """What of `PEAKS` a GPU reaches in a second, by any name; None where the table lacks it, and for a MIG slice."""
    words = f" {name.upper().replace('-', ' ')} "
    found = next((peaks for kind, peaks in GPUS.items() if f" {kind} " in words), None)
    return None if found is None or what not in PEAKS or " MIG " in words else 1e12 * found[PEAKS.index(what)]
