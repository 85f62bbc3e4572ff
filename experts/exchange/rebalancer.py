"""Decides on rank 0 where experts live: keeps load and speed, decides every N steps, announces placements.

The worker's end of the exchange asks it between steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import torch

from cluster.devices.limits import cpu_description, usable_cores
from experts.config import LayerShape
from experts.member.commit import VoteResult
from experts.placement.policy import PlacementRules
from experts.placement.rebalance import RebalanceDecision, action_of, changed_shares, decide, predict, split_moves
from experts.placement.values import Costs, HostSpec, Placement
from raytrain.runs.folder import RunFolder
from raytrain.train.compute.rates import product_flops
from raytrain.trainable import Notice

# ---------------------------------------------------------------- speed
# How fast a holder of experts computes, for the placement that a run starts with.

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
    """FLOPs per second of this process in products of the experts' size and of a `precision.dtype`; half a second.

    Args:
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
    """The speed of each holder, in any unit, by its kind. `measure` gets the kinds in the order of their first holders
    and returns the speed of each; it is called if there are several."""
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


# ---------------------------------------------------------------- rebalancer

#: Intervals that the forecast uses.
INTERVALS = 4
#: Assumed rate of the first move: packing, digests and unpacking, in seconds of one host.
FIRST_BYTES_PER_S = 2e8
#: Share of a step's time that the moves of one vote may take, ...
SHARE_OF_STEP = 0.3
#: ... and the bytes that it may always move.
LEAST_BYTES = 1 << 20


@dataclass
class LoadInterval:
    """Measured since the last decision: rows of each layer's experts, and seconds that each host computed."""

    load: list[list[float]]
    busy: list[float]
    steps: int = 0
    began: float = 0.0

    @classmethod
    def empty(cls, costs: Costs, hosts: int) -> LoadInterval:
        return cls([[0.0] * len(row) for row in costs], [0.0] * hosts, began=time.perf_counter())

    def add(self, result: VoteResult) -> None:
        counts, begin = result.counts.tolist(), 0
        for row in self.load:
            for expert in range(len(row)):
                row[expert] += counts[begin + expert]
            begin += len(row) + 1  # the drops
        self.busy = [total + own for total, own in zip(self.busy, result.busy_s, strict=True)]
        self.steps += 1

    def hosts(self, placement: Placement, hosts: Sequence[HostSpec], costs: Costs) -> list[HostSpec]:
        """The hosts with the speeds at which they computed their rows."""
        alike = [replace(spec, speed=1.0) for spec in hosts]
        work = [0.0] * len(alike)
        for layer, (load, row) in enumerate(zip(self.load, costs, strict=True)):
            done = placement.host_loads(layer, load, row, alike)
            work = [total + own for total, own in zip(work, done, strict=True)]
        known = [(done, spent) for done, spent in zip(work, self.busy, strict=True) if done > 0 and spent > 0]
        rates = [done / spent for done, spent in known]
        if not rates or max(rates) < ALIKE * min(rates):
            return alike
        mean = sum(rates) / len(rates)
        speeds = [
            done / spent / mean if done > 0 and spent > 0 else 1.0 for done, spent in zip(work, self.busy, strict=True)
        ]
        return [replace(spec, speed=speed) for spec, speed in zip(alike, speeds, strict=True)]


class LoadRebalancer:
    """Moves experts by their measured load and the measured speeds of the hosts; called on rank 0 only."""

    def __init__(self, rules: PlacementRules, costs: Costs, hosts: Sequence[HostSpec]) -> None:
        self.rules, self.costs, self.hosts = rules, costs, list(hosts)
        self._interval = LoadInterval.empty(costs, len(hosts))
        self._loads: list[list[list[float]]] = []
        self._thread: threading.Thread | None = None
        self._proposal: tuple[int, RebalanceDecision, list[HostSpec], Placement, float, float] | None = None
        self._error: BaseException | None = None
        self._queue: list[Placement] = []
        self._announced: tuple[int, Placement, Placement] | None = None
        self._moving_s, self._sent_bytes, self._bytes_per_s = 0.0, 0, FIRST_BYTES_PER_S
        self._notices: list[Notice] = []
        self._placement: Placement | None = None

    def next_placement(self, step: int) -> Placement | None:
        """The placement to announce with the vote on `step`, None for none."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if self._error is not None:
                raise self._error
            assert self._proposal is not None
            at, found, hosts, placement, step_s, seconds = self._proposal
            self._proposal = None
            if found.action != "keep" and placement is self._placement:
                budget = max(LEAST_BYTES, int(SHARE_OF_STEP * step_s * self._bytes_per_s))
                self._queue = split_moves(placement, found.placement, self.costs, hosts=self.hosts, budget=budget)
            row = {
                "what": "placement", "value": found.action, "step": at, "reason": found.reason,
                "bytes": found.bytes, "gain": found.gain, "seconds": seconds, "instalments": len(self._queue),
                "speeds": [spec.speed for spec in hosts],
            }  # fmt: skip
            self._notices.append(("decision", row))
        if self._announced is not None or not self._queue or self._placement is None:
            return None
        self._announced = step, self._placement, self._queue.pop(0)
        self._moving_s, self._sent_bytes = 0.0, 0
        return self._announced[2]

    def committed(self, step: int, result: VoteResult, placement: Placement, *, refused: str) -> None:
        """Called after the vote on a step. `placement` is in force now; `refused`: why the announced one is not."""
        if self._announced is None and self._placement is not None and placement is not self._placement:
            self._queue = []  # a newcomer was placed: what is queued began before it
        self._moving_s += max(result.moving_s, default=0.0)
        self._sent_bytes += int(sum(result.sent_bytes))
        self._placement = placement
        if self._announced is not None and step > self._announced[0]:
            (_, before, after), self._announced = self._announced, None
            if refused:
                self._queue = []
                self._notices.append(("move_refused", {"step": step, "version": after.version, "reason": refused}))
            else:
                moves, size = before.moves_to(after, self.costs), self._sent_bytes
                if size and self._moving_s > 0:
                    self._bytes_per_s = 0.5 * (self._bytes_per_s + size / self._moving_s)
                row = {
                    "what": action_of(moves), "step": step, "version": after.version, "bytes": size,
                    "seconds": self._moving_s,
                    "changes": [[move.kind, move.layer, move.expert, move.source, move.target] for move in moves],
                    "shares": changed_shares(before, after),
                }  # fmt: skip
                self._notices.append(("move" if moves else "shares", row))
        if bool(result.skip):
            return
        self._interval.add(result)
        idle = self._thread is None and self._announced is None and not self._queue
        if self.rules.every and step % self.rules.every == 0 and idle:
            self._decide(step, placement)

    def notices(self) -> list[Notice]:
        """Events since the last call, as (kind, fields)."""
        taken, self._notices = self._notices, []
        return taken

    def _decide(self, step: int, placement: Placement) -> None:
        """Decide in a thread: it takes seconds for the largest models."""
        interval, self._interval = self._interval, LoadInterval.empty(self.costs, len(self.hosts))
        self._loads = [*self._loads, interval.load][-INTERVALS:]
        loads = list(self._loads)
        hosts = interval.hosts(placement, self.hosts, self.costs)
        step_s = (time.perf_counter() - interval.began) / interval.steps

        def run() -> None:
            began = time.perf_counter()
            try:
                found = decide(
                    placement, predict(loads), hosts, self.costs, self.rules.policy, self.rules.replicas,
                    steps_until_next=self.rules.every or 1, step_s=max(interval.busy) / interval.steps,
                    bytes_per_s=self._bytes_per_s,
                )  # fmt: skip
            except Exception as error:  # raised again in the training thread
                self._error = error
                return
            self._proposal = step, found, hosts, placement, step_s, time.perf_counter() - began

        self._thread = threading.Thread(target=run, daemon=True, name="placement")
        self._thread.start()
