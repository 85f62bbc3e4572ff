"""The verb `top`: the devices and Ray's workers of every node, as a table that is drawn again and again."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.telemetry.sampler import NodeSampler, node_name
from cluster.wording import size
from raytrain.errors import InputError

#: A node that has not answered by then is shown as such, and asked again.
NODE_LIMIT_S = 5.0
Row = dict[str, Any]
Sample = Callable[[], list[Row]]
"""Samples all nodes: rows of `NodeSampler.sample`, or {"node", "missing"} for one that does not answer."""


def run_top(*, address: str | None, every: float, frames: int | None, as_json: bool, console: Console) -> int:
    """Show frames until Ctrl-C or the last one; returns the exit code."""
    if every <= 0:
        raise InputError("--every", got=f"{every:g}", expected="seconds above 0")
    if frames is not None and frames < 1:
        raise InputError("--frames", got=str(frames), expected="1 or more")
    with contextlib.suppress(KeyboardInterrupt), _samples(address) as sample:
        # utilisation counts from one sample to the next
        sample()
        if as_json or not console.is_terminal:
            for rows in _frames(sample, every, frames):
                console.out(json.dumps(rows) if as_json else frame_text(rows, width=console.width), highlight=False)
            return 0
        with Live(console=console, auto_refresh=False, screen=frames is None) as live:
            for rows in _frames(sample, every, frames):
                live.update(frame(rows), refresh=True)
    return 0


def _frames(sample: Sample, every: float, number: int | None) -> Iterator[list[Row]]:
    due, shown = time.monotonic(), 0
    while number is None or shown < number:
        due = max(due + every, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        yield sample()
        shown += 1


@contextlib.contextmanager
def _samples(address: str | None) -> Iterator[Sample]:
    if address is None:
        sampler = NodeSampler(node_name("127.0.0.1"), every_job=True)
        yield lambda: [sampler.sample()]
        return
    from jobs.driver.runtime import connected

    with connected(address, num_cpus=0, num_gpus=0, verbose=False):
        yield ClusterSampler().sample


class ClusterSampler:
    """An actor on each node of the connected cluster; a node that joins later gets one too."""

    def __init__(self) -> None:
        self._actors: dict[str, tuple[str, Any]] = {}

    def sample(self) -> list[Row]:
        import ray
        import ray.exceptions

        from cluster.ray_runtime import on_node

        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        self._actors = {node: known for node, known in self._actors.items() if node in alive}
        for node in alive.keys() - self._actors.keys():
            name = f"{alive[node]} {node[:6]}" if list(alive.values()).count(alive[node]) > 1 else alive[node]
            options = {"num_cpus": 0, "scheduling_strategy": on_node(node), "max_restarts": -1}
            self._actors[node] = name, ray.remote(NodeSampler).options(**options).remote(name, every_job=True)
        asked = {actor.sample.remote(): name for name, actor in self._actors.values()}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=NODE_LIMIT_S)
        rows = list[Row]()
        for one, name in asked.items():
            try:
                late = {"node": name, "missing": f"no answer within {NODE_LIMIT_S:g} s"}
                rows.append(ray.get(one) if one in ready else late)
            except ray.exceptions.RayError as error:
                rows.append({"node": name, "missing": f"no sample: {str(error).splitlines()[0]}"})
        return sorted(rows, key=lambda row: row["node"])


# -- the frame ---------------------------------------------------------------------------------------------


def frame(rows: Sequence[Row]) -> Group:
    """The tables of one frame: the devices of all nodes, then Ray's workers, the busiest first."""
    several = len(rows) > 1
    devices = _table(several, "device", "util", "memory", "Ray's", "temp", "power", "slowed by")
    for row in rows:
        if "missing" in row:
            devices.add_row(*_node(row, several), row["missing"])
        for device in row.get("devices", ()):
            devices.add_row(*_node(row, several), *_device_cells(device))
    workers = _table(several, "pid", "worker", "cpu", "memory")
    found = [(row, one) for row in rows for one in row.get("processes", ())]
    for row, one in sorted(found, key=lambda pair: -(pair[1]["cpu_percent"] or 0.0)):
        busy = "-" if one["cpu_percent"] is None else f"{one['cpu_percent']:.0f} %"
        workers.add_row(*_node(row, several), str(one["pid"]), _title(one["name"]), busy, size(one["rss"]))
    heading = Text(f"{time.strftime('%H:%M:%S')}  {len(rows)} node{'s' * several}, {len(found)} workers of Ray")
    return Group(heading, devices, workers) if found else Group(heading, devices)


def frame_text(rows: Sequence[Row], *, width: int) -> str:
    console = Console(width=width, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(frame(rows))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


#: Columns of words: where a terminal is narrow these are broken, and figures stay whole.
WORDS = ("node", "device", "worker", "slowed by")


def _table(several: bool, *titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in (*(("node",) if several else ()), *titles):
        numeric = title in ("util", "cpu", "memory", "Ray's", "temp", "power", "pid")
        table.add_column(title, justify="right" if numeric else "left", no_wrap=title not in WORDS)
    return table


def _node(row: Row, several: bool) -> tuple[str, ...]:
    return (str(row["node"]),) if several else ()


def _device_cells(device: Row) -> tuple[str, ...]:
    def shown(key: str, unit: str) -> str:
        return "-" if device[key] is None else f"{device[key]:.0f} {unit}"

    used, total = device["memory_used"], device["memory_total"]
    memory = "-" if used is None or not total else f"{size(used)} of {size(total)}"
    slowed = "-" if device["throttle"] is None else ", ".join(device["throttle"]) or "nothing"
    return (
        device["device"], shown("utilisation", "%"), memory, size(device["memory_run"]), shown("temperature_c", "C"),
        shown("power_w", "W"), slowed,
    )  # fmt: skip


def _title(name: str) -> str:
    """Of a process: Ray's titles as they are, of another its program without its folder."""
    first, _, rest = name.partition(" ")
    return name if name.startswith("ray::") else f"{first.rpartition('/')[2]} {rest}".strip()[:50]
