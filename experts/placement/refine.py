"""The local search of our policy: improves a layer's layout until it is near its bound, or the budget is used up."""

from __future__ import annotations

import random
from collections.abc import Iterator

from experts.placement.packing import Change, Packing
from experts.placement.shares import WorkSplit, divide

#: A layout within this relative distance of the bound is good enough: the load drifts by more.
GOOD = 0.005
#: Number of hosts, copies and replicas on either side that one step takes candidates from.
BREADTH = 8
#: Relative gain that a candidate must bring on the slowest host.
WORTH = 1e-6
#: Random exchanges of one restart, and their seed.
KICK, SEED = 3, 20


class LocalSearch:
    """Improves `layout`; `budget` counts the hosts and replicated experts of each evaluation."""

    def __init__(self, layout: Packing, *, budget: int) -> None:
        self.layout, self.budget, self.task = layout, budget, layout.task
        self.enough = self.task.bound * (1 + GOOD)
        self.now = self._evaluate()

    def climb(self) -> None:
        """Apply improving candidates until there are none."""
        while self.budget > 0 and self.now.level > self.enough and self._step():
            continue

    def restart(self) -> None:
        """Climb again from random exchanges of the best layout, with a fixed seed, while the budget lasts."""
        draw = random.Random(SEED)
        best, kept = self.now, [list(hosts) for hosts in self.layout.copies]
        while self.budget > 0 and best.level > self.enough:
            for _ in range(KICK):
                self._exchange_any(draw)
            self.now = self._evaluate()
            self.climb()
            if self.now.level < best.level * (1 - WORTH):
                best, kept = self.now, [list(hosts) for hosts in self.layout.copies]
            else:
                self._set_all(kept)
        self._set_all(kept)
        self.now = best

    def _set_all(self, copies: list[list[int]]) -> None:
        self.layout = Packing(self.task, [list(hosts) for hosts in copies])

    def _evaluate(self, change: Change | None = None) -> WorkSplit:
        """The best split of the layout's work; the layout is that of `now` except for `change`."""
        changed = {expert for expert, _ in change or ()}
        start = {e: parts for e, parts in self.now.parts.items() if e not in changed} if change else None
        found = divide(self.task.work, self.layout.copies, self.task.speeds, start=start)
        self.budget -= len(self.task.work) // 4 + len(self.task.speeds) + 8 * len(found.parts)
        return found

    def _step(self) -> bool:
        for _, change in sorted(self._candidates(), key=lambda scored: scored[0]):
            if self.budget <= 0:
                return False
            back = self.layout.apply(change)
            if back is None:
                self.budget -= 1
                continue
            found = self._evaluate(change)
            if self._better(found):
                self.now = found
                return True
            self.layout.apply(back)
        return False

    def _better(self, found: WorkSplit) -> bool:
        """Whether the slowest host is faster; or equal, and the load more even."""
        if found.level < self.now.level * (1 - WORTH):
            return True
        return found.level <= self.now.level * (1 + 1e-9) and self._spread(found) < self._spread(self.now) * (1 - 1e-4)

    def _spread(self, split: WorkSplit) -> float:
        return sum(load * load / speed for load, speed in zip(split.loads, self.task.speeds, strict=True))

    def _exchange_any(self, draw: random.Random) -> None:
        copies = self.layout.copies
        a, b = draw.randrange(len(copies)), draw.randrange(len(copies))
        g, h = draw.choice(copies[a]), draw.choice(copies[b])
        if a != b and g not in copies[b] and h not in copies[a]:
            self.layout.apply([(a, _swap(copies[a], g, h)), (b, _swap(copies[b], h, g))])

    def _candidates(self) -> Iterator[tuple[float, Change]]:
        """(estimated time of the slower of the two hosts, change); the estimate leaves all other parts unchanged."""
        loads, speeds, copies = self.now.loads, self.task.speeds, self.layout.copies
        order = sorted(range(len(speeds)), key=lambda host: (-loads[host] / speeds[host], host))
        top = loads[order[0]] / speeds[order[0]] * (1 - 1e-6)
        high = [host for host in order if loads[host] / speeds[host] >= top][:BREADTH]
        low = order[::-1][:BREADTH]
        held = self._held()
        replicas = sorted(
            (self.now.parts[e][p], e, host) for e, hosts in enumerate(copies) for p, host in enumerate(hosts) if p
        )[: BREADTH // 2]
        for g in high:
            for expert, part in held[g]:
                for h in low:
                    if h == g or h in copies[expert]:
                        continue
                    moved = (expert, _swap(copies[expert], g, h))
                    if self.layout.slots[h] >= 1:
                        yield self._estimate(g, h, part), [moved]
                    for other, theirs in held[h]:
                        if theirs < part and g not in copies[other]:
                            yield self._estimate(g, h, part - theirs), [moved, (other, _swap(copies[other], h, g))]
                    yield from self._replicate(expert, part, g, h, replicas)

    def _replicate(
        self, expert: int, part: float, g: int, h: int, replicas: list[tuple[float, int, int]]
    ) -> Iterator[tuple[float, Change]]:
        """Add a copy of `expert` on `h`, in place of another replica if none is spare."""
        loads, speeds, copies = self.now.loads, self.task.speeds, self.layout.copies
        even = (loads[g] * speeds[h] - loads[h] * speeds[g]) / (speeds[g] + speeds[h])
        score = self._estimate(g, h, min(part, max(0.0, even)))
        grown, room = [*copies[expert], h], self.layout.slots[h] >= 1
        if self.layout.spare > 0 and room:
            yield score, [(expert, grown)]
        for size, other, host in replicas:
            if not room and host != h:
                continue
            if other != expert:
                left = [place for place in copies[other] if place != host]
                yield score + size / sum(speeds), [(other, left), (expert, grown)]
            elif host != g:
                yield score + size / sum(speeds), [(expert, [place for place in grown if place != host])]

    def _estimate(self, g: int, h: int, amount: float) -> float:
        loads, speeds = self.now.loads, self.task.speeds
        return max((loads[g] - amount) / speeds[g], (loads[h] + amount) / speeds[h])

    def _held(self) -> list[list[tuple[int, float]]]:
        """The copies of every host, largest first: (expert, its part)."""
        found: list[list[tuple[int, float]]] = [[] for _ in self.task.speeds]
        for expert, hosts in enumerate(self.layout.copies):
            parts = self.now.parts.get(expert)
            for position, host in enumerate(hosts):
                found[host].append((expert, self.task.work[expert] if parts is None else parts[position]))
        for held in found:
            held.sort(key=lambda item: (-item[1], item[0]))
        return found


def _swap(hosts: list[int], old: int, new: int) -> list[int]:
    return [new if host == old else host for host in hosts]
