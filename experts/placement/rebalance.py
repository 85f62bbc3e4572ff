"""Forecasts the next interval's load, and decides whether to keep the placement, move experts or change replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from experts.placement.lpt import OutOfRoom, plan
from experts.placement.policy import OURS, Load, Policy, place
from experts.placement.values import Costs, HostSpec, LayerPlacement, Move, Placement, reshare
from raytrain.plan.choice import seconds_text

#: Weight of the newest interval in the forecast. With synthetic drifts and sampling noise 1, 0.85 and 0.7 gave equal
#: max over mean in the next interval (1.1130, 1.1123, 1.1127), slower averages more (0.5: 1.120, 0.3: 1.139).
NEWEST = 0.85
#: Minimum factor by which the experts' time must fall: the load drifts by a few percent between intervals anyway.
MARGIN = 1.03
#: Minimum ratio of the seconds saved, which are forecast, to the seconds that the bytes take, which are certain.
PAYS_BACK = 1.5

Action = Literal["keep", "move", "replicas", "both", "shares"]


@dataclass(frozen=True)
class RebalanceDecision:
    """Whether and how to change the placement.

    Attributes:
        action: "move" changes homes, "replicas" replica sets, "both" both; "shares" neither, only how rows are divided
            over the present copies.
        placement: the new one; the current one for "keep".
        moves: the difference to the current one.
        gain: predicted time of the experts in a step now over that afterwards, of the best candidate also for "keep".
        bytes: sent by its moves of homes. Replicas add none: every commit sends their weights anyway.
        reason: one sentence with the numbers.
    """

    action: Action
    placement: Placement
    moves: tuple[Move, ...]
    gain: float
    bytes: int
    reason: str


def predict(intervals: Sequence[Load]) -> list[list[float]]:
    """Forecast the rows per expert of the next interval: an exponential average of the past ones, oldest first.

    Each layer counts as shares of its interval's rows, so that long and short intervals have equal weight.
    """
    found = []
    for layer, last in enumerate(intervals[-1]):
        past = [np.asarray(interval[layer], dtype=np.float64) for interval in intervals]
        shares = [one / one.sum() for one in past if one.sum() > 0]
        if not shares:
            found.append([0.0] * len(last))
            continue
        mean = shares[0]
        for share in shares[1:]:
            mean = NEWEST * share + (1 - NEWEST) * mean
        found.append((mean * (past[-1].sum() or 1.0)).tolist())
    return found


def step_seconds(placement: Placement, load_LE: Load, hosts: Sequence[HostSpec], costs: Costs) -> float:
    """Time of the experts in one step, in the unit of `host_loads`: every layer waits for its slowest host."""
    rows = zip(load_LE, costs, strict=True)
    return sum(max(placement.host_loads(index, load, row, hosts)) for index, (load, row) in enumerate(rows))


def decide(
    current: Placement, load_LE: Load, hosts: Sequence[HostSpec], costs: Costs, policy: Policy, replicas: int, *,
    steps_until_next: int, step_s: float, bytes_per_s: float,
) -> RebalanceDecision:  # fmt: skip
    """Decide whether to change the placement, by the predicted savings until the next decision.

    When hosts are added or removed, call `place` with the old placement as `previous` instead.

    Args:
        hosts: of `current`, with their measured speeds.
        load_LE: predicted for the interval until the next decision.
        steps_until_next: number of steps of that interval.
        step_s: seconds of a step that the experts take under `current`, the only ones that can be saved.
        bytes_per_s: rate of sending weights; a move counts as if training stopped meanwhile.

    Raises:
        InputError: see `place`.
    """
    now, number = step_seconds(current, load_LE, hosts, costs), current.version + 1
    wanted = place(policy, load_LE, hosts, costs, replicas, current, number)
    others = _without_home_moves(current, load_LE, hosts, costs, replicas) if policy in OURS else ()
    offers = []
    for candidate in (*others, wanted):
        moves = tuple(current.moves_to(candidate, costs))
        then = step_seconds(candidate, load_LE, hosts, costs)
        amount = sum(move.bytes for move in moves if move.kind == "home")
        gain = now / then if then > 0 else 1.0
        saved, cost = steps_until_next * step_s * (1 - 1 / gain), amount / bytes_per_s
        offers.append((saved, cost, RebalanceDecision(action_of(moves), candidate, moves, gain, amount, "")))
    good = [offer for offer in offers if offer[2].gain >= MARGIN and offer[0] >= PAYS_BACK * offer[1]]
    saved, cost, best = max(good or offers, key=lambda offer: offer[0] - offer[1] if good else offer[2].gain)
    less, takes = (seconds_text(spent, digits=3) for spent in (saved, cost))
    numbers = (
        f"the experts of a step {best.gain:.3f} times as fast, {less} in {steps_until_next} steps; "
        f"{best.bytes} bytes take {takes}"
    )
    if good:
        return replace(best, reason=numbers)
    if best.gain < MARGIN:
        why = f"{numbers}: less than {MARGIN:g} times is within the drift"
    else:
        why = f"{numbers}: the seconds saved must be {PAYS_BACK:g} times that"
    return RebalanceDecision("keep", current, (), best.gain, best.bytes, why)


def _without_home_moves(
    current: Placement, load_LE: Load, hosts: Sequence[HostSpec], costs: Costs, replicas: int
) -> Iterator[Placement]:
    """Candidates that move no home: with other shares only, then with other replicas."""
    speeds = [host.speed for host in hosts]
    rows = zip(current.layers, load_LE, costs, strict=True)
    shared: tuple[LayerPlacement, ...] = tuple(reshare(layer, load, row, speeds) for layer, load, row in rows)
    number = current.version + 1
    yield Placement(number, current.num_hosts, shared)
    try:
        layers = plan(load_LE, hosts, costs, replicas, previous=current, search=False)
    except OutOfRoom:
        return
    yield Placement(number, current.num_hosts, tuple(layers))


def action_of(moves: Sequence[Move]) -> Action:
    """Classify a change of placement by its moves."""
    if not moves:
        return "shares"
    homes = any(move.kind == "home" for move in moves)
    replicas = any(move.kind != "home" for move in moves)
    return ("both" if replicas else "move") if homes else "replicas"


def changed_shares(before: Placement, after: Placement) -> list[list[Any]]:
    """Experts with replicas whose shares differ: [layer, expert, {host: share} before, {host: share} after]."""
    found: list[list[Any]] = []
    for layer, (old, new) in enumerate(zip(before.layers, after.layers, strict=True)):
        for expert in range(len(old.copies)):
            was, now = (
                {str(host): part for host, part in zip(one.copies[expert], one.shares[expert], strict=True)}
                for one in (old, new)
            )
            if was != now and max(len(was), len(now)) > 1:
                found.append([layer, expert, was, now])
    return found


def split_moves(
    current: Placement, target: Placement, costs: Costs, *, hosts: Sequence[HostSpec], budget: int
) -> list[Placement]:
    """Split the change from `current` to `target` into placements that each move homes of at most `budget` bytes.

    An expert larger than that moves alone. Replicas, which need no move, change with the last placement. Intermediate
    placements fit the memory of the hosts; experts that would exceed it move with the last placement.
    """
    found, at, moved = [], current, 0
    for (layer, expert), _, _ in current.home_moves(target):
        new = target.layers[layer]
        size, after = (
            costs[layer][expert].travels,
            at.with_copies(layer, expert, new.copies[expert], new.shares[expert]),
        )
        if not after.fits(hosts, costs):
            continue
        if moved and moved + size > budget:
            found.append(replace(at, version=current.version + len(found) + 1))
            moved = 0
        at, moved = after, moved + size
    if moved and at.home_moves(target):
        found.append(replace(at, version=current.version + len(found) + 1))
    return [*found, replace(target, version=current.version + len(found) + 1)]
