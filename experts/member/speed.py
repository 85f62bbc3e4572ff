"""How fast a holder of experts computes, for the placement that a run starts with.

Holders of one kind (the same GPU, or the same CPU model and threads) count as equally fast, so nothing is measured
where there is one kind only. Otherwise each kind is measured once, by a matrix product of the experts' size.
A resumed run uses the speeds that it recorded, so that its experts are placed as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt

import torch

from cluster.devices.limits import cpu_description, usable_cores
from experts.shapes import LayerShape
from raytrain.runs.folder import RunFolder
from raytrain.train.compute.rates import product_flops

MEASURE_S = 0.25
"""Seconds of one measurement; a holder makes at most two."""
WIDEST = {"cpu": 512, "cuda": 4096}
"""Widest measured product: rates hardly change beyond, and a wider one would take too long."""
ALIKE = 1.2
"""Holders whose measured speeds differ by less count as equal: on a busy machine noise alone causes that much."""


def kind_of(device: torch.device, *, threads: int) -> str:
    """What decides how fast a holder is: its GPU, or its CPU model and the threads that have a core."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    number = min(threads, usable_cores()[0])
    return f"{cpu_description()[0]}, {number} {'thread' if number == 1 else 'threads'}"


def measure_speed(device: torch.device, shapes: Sequence[LayerShape], dtype: str, *, threads: int) -> float:
    """FLOPs per second of this process in products of the experts' size; about half a second.

    Args:
        shapes: of the layers.
        dtype: number format of the products, a value of `precision.dtype`.
        threads: of a CPU. The better of one and all of them counts: while other processes use the cores, several
            threads can take longer than one, which says nothing about the device.
    """
    width = isqrt(max(shape.width * max(shape.hidden_E) for shape in shapes))
    width = max(1, min(width, WIDEST["cuda" if device.type == "cuda" else "cpu"]))
    before, found = torch.get_num_threads(), []
    try:
        for number in sorted({1, threads}) if device.type == "cpu" else [before]:
            torch.set_num_threads(number)
            found.append(product_flops(device, dtype, width=width, budget_s=MEASURE_S))
    finally:
        torch.set_num_threads(before)
    return max(found)


def speeds_by_kind(kinds: Sequence[str], measure: Callable[[Sequence[str]], Sequence[float]]) -> list[float]:
    """The speed of each holder, in any unit.

    Args:
        kinds: of each holder.
        measure: kinds, in the order of their first holders -> speed of each; called if there are several.
    """
    distinct = list(dict.fromkeys(kinds))
    if len(distinct) == 1:
        return [1.0] * len(kinds)
    measured = dict(zip(distinct, measure(distinct), strict=True))
    if max(measured.values()) < ALIKE * min(measured.values()):
        return [1.0] * len(kinds)
    return [measured[kind] for kind in kinds]


def recorded_speeds(run_path: str) -> dict[str, float]:
    """Kind -> speed in the last placement that a run recorded; empty if it has none."""
    run = RunFolder(run_path)
    for row in reversed(run.read_rows(run.events)):
        if row.get("kind") == "placement" and row.get("kinds"):
            return dict(zip(row["kinds"], row["speeds"], strict=True))
    return {}
