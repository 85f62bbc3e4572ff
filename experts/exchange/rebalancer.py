"""Rank 0's side of moving experts: it keeps the measured load, decides every so many steps, and tells what comes next.

The decision is `experts.placement.rebalance.decide`, made in a thread from the load of the windows so far and the speed
of the hosts in the last one. What it decides is told in instalments, each small enough to travel while a step computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from experts.member.vote import Tally
from experts.placement.rebalance import RebalanceDecision, action_of, changed_shares, decide, instalments, predict
from experts.placement.starting import PlacementRules
from experts.placement.values import Costs, HostSpec, Placement
from raytrain.trainable import Notice

#: Windows that the forecast looks back on.
WINDOWS = 4
#: Hosts whose measured speeds differ by less are taken for equal: a busy machine measures as much from noise alone.
ALIKE = 1.2
#: At which state is taken to move before any has: packing, digests and unpacking, in seconds of one host.
FIRST_BYTES_PER_S = 2e8
#: Of a step's time may be spent on one instalment ...
SHARE_OF_STEP = 0.3
#: ... which moves so much anyway.
LEAST_BYTES = 1 << 20


class Balances(Protocol):
    """Who decides where experts live; asked on rank 0 only."""

    def next(self, step: int) -> Placement | None:
        """What everybody is to be told with the vote on `step`."""
        ...

    def committed(self, step: int, agreed: Tally, placement: Placement, *, refused: str) -> None:
        """A step was voted on; `placement` is in force since. `refused`: why the one announced was not taken."""
        ...

    def notices(self) -> list[Notice]:
        """(kind, fields) for the record, since the last call."""
        ...


@dataclass
class LoadInterval:
    """What was measured since the last decision: rows of each layer's experts, seconds that each host computed."""

    load: list[list[float]]
    busy: list[float]
    steps: int = 0
    began: float = 0.0

    @classmethod
    def empty(cls, costs: Costs, hosts: int) -> LoadInterval:
        """From now on."""
        return cls([[0.0] * len(row) for row in costs], [0.0] * hosts, began=time.perf_counter())

    def add(self, agreed: Tally) -> None:
        """One step."""
        counts, begin = agreed.counts.tolist(), 0
        for row in self.load:
            for expert in range(len(row)):
                row[expert] += counts[begin + expert]
            begin += len(row) + 1  # the drops
        self.busy = [total + own for total, own in zip(self.busy, agreed.busy_s, strict=True)]
        self.steps += 1

    def hosts(self, placement: Placement, hosts: Sequence[HostSpec], costs: Costs) -> list[HostSpec]:
        """The hosts with the speed at which they computed their rows."""
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


@dataclass(frozen=True)
class Thought:
    """A decision, on what it was made, and how long that took."""

    step: int
    decision: RebalanceDecision
    hosts: list[HostSpec]
    placement: Placement
    step_s: float
    seconds: float


class Balancer:
    """Implements `Balances`.

    Args:
        costs: of each expert of each layer.
        hosts: those of the placements; their speeds are measured.
    """

    def __init__(self, rules: PlacementRules, costs: Costs, hosts: Sequence[HostSpec]) -> None:
        self.rules, self.costs, self.hosts = rules, costs, list(hosts)
        self._window = LoadInterval.empty(costs, len(hosts))
        self._loads: list[list[list[float]]] = []
        self._thread: threading.Thread | None = None
        self._thought: Thought | None = None
        self._error: BaseException | None = None
        self._queue: list[Placement] = []
        self._told: tuple[int, Placement, Placement] | None = None
        self._moving_s, self._sent_bytes, self._bytes_per_s = 0.0, 0, FIRST_BYTES_PER_S
        self._notices: list[Notice] = []
        self._placement: Placement | None = None

    def next(self, step: int) -> Placement | None:
        """See `Balances`."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._line_up()
        if self._told is not None or not self._queue or self._placement is None:
            return None
        self._told = step, self._placement, self._queue.pop(0)
        self._moving_s, self._sent_bytes = 0.0, 0
        return self._told[2]

    def committed(self, step: int, agreed: Tally, placement: Placement, *, refused: str) -> None:
        """See `Balances`."""
        self._moving_s += max(agreed.moving_s, default=0.0)
        self._sent_bytes += int(sum(agreed.sent_bytes))
        self._placement = placement
        if self._told is not None and step > self._told[0]:
            self._end_move(step, refused=refused)
        if bool(agreed.skip):
            return
        self._window.add(agreed)
        idle = self._thread is None and self._told is None and not self._queue
        if self.rules.every and step % self.rules.every == 0 and idle:
            self._decide(step, placement)

    def notices(self) -> list[Notice]:
        """See `Balances`."""
        taken, self._notices = self._notices, []
        return taken

    def _decide(self, step: int, placement: Placement) -> None:
        """In a thread: for the largest models it takes seconds."""
        window, self._window = self._window, LoadInterval.empty(self.costs, len(self.hosts))
        self._loads = [*self._loads, window.load][-WINDOWS:]
        loads = list(self._loads)
        hosts = window.hosts(placement, self.hosts, self.costs)
        step_s = (time.perf_counter() - window.began) / window.steps

        def think() -> None:
            began = time.perf_counter()
            try:
                found = decide(
                    placement, predict(loads), hosts, self.costs, self.rules.policy, self.rules.replicas,
                    steps_until_next=self.rules.every or 1, step_s=max(window.busy) / window.steps,
                    bytes_per_s=self._bytes_per_s,
                )  # fmt: skip
            except Exception as error:  # raised by the training thread
                self._error = error
                return
            self._thought = Thought(step, found, hosts, placement, step_s, time.perf_counter() - began)

        self._thread = threading.Thread(target=think, daemon=True, name="placement")
        self._thread.start()

    def _line_up(self) -> None:
        """Write the decision down, and its instalments in a row."""
        if self._error is not None:
            raise self._error
        thought, self._thought = self._thought, None
        assert thought is not None
        found = thought.decision
        if found.action != "keep":
            budget = max(LEAST_BYTES, int(SHARE_OF_STEP * thought.step_s * self._bytes_per_s))
            self._queue = instalments(thought.placement, found.placement, self.costs, hosts=self.hosts, budget=budget)
        told = {
            "what": "placement", "value": found.action, "step": thought.step, "reason": found.reason,
            "bytes": found.bytes, "gain": found.gain, "seconds": thought.seconds, "instalments": len(self._queue),
            "speeds": [spec.speed for spec in thought.hosts],
        }  # fmt: skip
        self._notices.append(("decision", told))

    def _end_move(self, step: int, *, refused: str) -> None:
        assert self._told is not None
        (_, before, told), self._told = self._told, None
        if refused:
            self._queue = []
            self._notices.append(("move_refused", {"step": step, "version": told.version, "reason": refused}))
            return
        moves, size = before.moves_to(told, self.costs), self._sent_bytes
        if size and self._moving_s > 0:
            self._bytes_per_s = 0.5 * (self._bytes_per_s + size / self._moving_s)
        row = {
            "what": action_of(moves), "step": step, "version": told.version, "bytes": size, "seconds": self._moving_s,
            "changes": [[move.kind, move.layer, move.expert, move.source, move.target] for move in moves],
            "shares": changed_shares(before, told),
        }  # fmt: skip
        self._notices.append(("move" if moves else "shares", row))
