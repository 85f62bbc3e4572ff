"""When to place again: the forecast of the next window's load, and the decision to keep, move or change replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from experts.placement.lpt import HostLimits, plan
from experts.placement.packing import OutOfRoom
from experts.placement.policy import Load, Policy, place
from experts.placement.shares import reshare
from experts.placement.values import Costs, HostSpec, LayerPlacement, Move, Placement

#: Weight of the newest window in the forecast. Over synthetic drifts and sampling noise 1, 0.85 and 0.7 gave the same
#: max over mean in the next window (1.1130, 1.1123, 1.1127), slower averages more (0.5: 1.120, 0.3: 1.139).
NEWEST = 0.85
#: The experts' time must fall by this factor at least: from one window to the next the load drifts by a few percent
#: anyhow, and a gain within that is no gain.
MARGIN = 1.03
#: The seconds saved must be this times the seconds that the bytes take: those are certain, the forecast is not.
PAYS_BACK = 1.5

Action = Literal["keep", "move", "replicas", "both", "shares"]


@dataclass(frozen=True)
class RebalanceDecision:
    """What to do at this boundary, taken or not.

    Attributes:
        action: "move" changes homes, "replicas" changes replica sets, "both" both; "shares" neither, only how the rows
            are divided over the copies that there are.
        placement: from now on; the current one for "keep".
        moves: what leads there.
        gain: predicted time of the experts in a step now over that afterwards, of the best candidate also for "keep".
        bytes: what its moves of homes send. Replicas cost none: their weights travel at every commit anyway.
        reason: one sentence with its numbers.
    """

    action: Action
    placement: Placement
    moves: tuple[Move, ...]
    gain: float
    bytes: int
    reason: str


def predict(windows: Sequence[Load], *, newest: float = NEWEST) -> list[list[float]]:
    """Rows per expert in the next window: an exponential average of the past ones, oldest first.

    Layers are taken as shares of their window's rows, so that long and short windows count alike.

    Args:
        windows: at least one, each [layer][expert]; those of another number of experts than the last are left out.
        newest: weight of the newest; 1 takes the last window alone.
    """
    last = [np.asarray(row, dtype=np.float64) for row in windows[-1]]
    found = []
    for layer, row in enumerate(last):
        past = [np.asarray(w[layer], dtype=np.float64) for w in windows if len(w) > layer and len(w[layer]) == len(row)]
        shares = [one / one.sum() for one in past if one.sum() > 0]
        if not shares:
            found.append([0.0] * len(row))
            continue
        mean = shares[0]
        for share in shares[1:]:
            mean = newest * share + (1 - newest) * mean
        found.append((mean * (row.sum() or 1.0)).tolist())
    return found


def step_seconds(placement: Placement, load_LE: Load, hosts: Sequence[HostSpec], costs: Costs) -> float:
    """Time of the experts in one step: every layer waits for its slowest host. In the unit of `host_loads`."""
    rows = zip(load_LE, costs, strict=True)
    return sum(max(placement.host_loads(index, load, row, hosts)) for index, (load, row) in enumerate(rows))


def decide(
    current: Placement, load_LE: Load, hosts: Sequence[HostSpec], costs: Costs, policy: Policy, replicas: int, *,
    steps_until_next: int, step_s: float, bytes_per_s: float, slots_per_host: int | None = None,
) -> RebalanceDecision:  # fmt: skip
    """Keep the placement, or change it, by what the next window is predicted to save.

    Where hosts come or go there is nothing to weigh up: `place` with the old placement as `previous`.

    Args:
        hosts: those of `current`, with their speeds as measured now.
        load_LE: predicted for the window until the next decision.
        steps_until_next: its steps.
        step_s: seconds of a step that the experts take under `current`; only these can become fewer.
        bytes_per_s: at which weights travel; moving counts as if training stood still meanwhile.

    Raises:
        InputError: see `place`.
    """
    now, number = step_seconds(current, load_LE, hosts, costs), current.version + 1
    wanted = place(policy, load_LE, hosts, costs, replicas, current, number, slots_per_host=slots_per_host)
    others = _smaller(current, load_LE, hosts, costs, replicas, slots_per_host) if policy in ("auto", "lpt") else ()
    offers = []
    for candidate in (*others, wanted):
        moves = tuple(current.moves_to(candidate, costs))
        then = step_seconds(candidate, load_LE, hosts, costs)
        amount = sum(move.bytes for move in moves if move.kind == "home")
        gain = now / then if then > 0 else 1.0
        saved, cost = steps_until_next * step_s * (1 - 1 / gain), amount / bytes_per_s
        offers.append(_Offer(candidate, moves, gain, amount, saved, cost))
    good = [offer for offer in offers if offer.gain >= MARGIN and offer.saved >= PAYS_BACK * offer.cost]
    best = max(good or offers, key=lambda offer: offer.saved - offer.cost if good else offer.gain)
    told = (
        f"the experts of a step {best.gain:.3f} times as fast, {best.saved:.3g} s in {steps_until_next} steps; "
        f"{best.bytes} bytes take {best.cost:.3g} s"
    )
    if good:
        return RebalanceDecision(action_of(best.moves), best.placement, best.moves, best.gain, best.bytes, told)
    if best.gain < MARGIN:
        why = f"{told}: less than {MARGIN:g} times is within the drift"
    else:
        why = f"{told}: what is saved must be {PAYS_BACK:g} times that"
    return RebalanceDecision("keep", current, (), best.gain, best.bytes, why)


@dataclass(frozen=True)
class _Offer:
    """A candidate with what it saves and costs, in seconds."""

    placement: Placement
    moves: tuple[Move, ...]
    gain: float
    bytes: int
    saved: float
    cost: float


def _smaller(
    current: Placement, load_LE: Load, hosts: Sequence[HostSpec], costs: Costs, replicas: int, slots: int | None
) -> Iterator[Placement]:
    """Candidates that move no home: other shares alone, then other replicas."""
    speeds = [host.speed for host in hosts]
    rows = zip(current.layers, load_LE, costs, strict=True)
    shared: tuple[LayerPlacement, ...] = tuple(reshare(layer, load, row, speeds) for layer, load, row in rows)
    number = current.version + 1
    yield Placement(number, current.num_hosts, shared)
    try:
        layers = plan(load_LE, hosts, costs, replicas, HostLimits.of(hosts, slots), previous=current, search=False)
    except OutOfRoom:
        return
    yield Placement(number, current.num_hosts, tuple(layers))


def action_of(moves: Sequence[Move]) -> Action:
    """What a change of placement with these moves is."""
    if not moves:
        return "shares"
    homes = any(move.kind == "home" for move in moves)
    replicas = any(move.kind != "home" for move in moves)
    return ("both" if replicas else "move") if homes else "replicas"


def changed_shares(before: Placement, after: Placement) -> list[list[Any]]:
    """[layer, expert, {host: part of its rows} before, the same after] of experts with copies, where they differ."""
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


def instalments(
    current: Placement, target: Placement, costs: Costs, *, hosts: Sequence[HostSpec], budget: int
) -> list[Placement]:
    """The way from `current` to `target` in placements that each move homes of at most `budget` bytes more.

    An expert larger than that moves alone. Replicas, which cost no move, change with the last of them. Every placement
    on the way fits the memory of the hosts, where some order does; experts that would not are left to the last.
    """
    found, at, taken = [], current, 0
    for (layer, expert), _, _ in current.home_moves(target):
        size, after = costs[layer][expert].travels, _with_home(at, target, layer, expert)
        if not after.fits(hosts, costs):
            continue
        if taken and taken + size > budget:
            found.append(replace(at, version=current.version + len(found) + 1))
            taken = 0
        at, taken = after, taken + size
    if taken and at.home_moves(target):
        found.append(replace(at, version=current.version + len(found) + 1))
    return [*found, replace(target, version=current.version + len(found) + 1)]


def _with_home(at: Placement, target: Placement, layer: int, expert: int) -> Placement:
    """`at` with one expert where `target` has it; its copies and shares too."""
    old, new = at.layers[layer], target.layers[layer]
    copies, shares = list(old.copies), list(old.shares)
    copies[expert], shares[expert] = new.copies[expert], new.shares[expert]
    changed = LayerPlacement(tuple(copies), tuple(shares))
    return replace(at, layers=(*at.layers[:layer], changed, *at.layers[layer + 1 :]))
