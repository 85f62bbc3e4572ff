"""Whether the nodes of a cluster have room for the processes of a job: each of them needs its resources on one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.wording import counted

TYPE_SHARE = 0.001
"""Amount of a node's accelerator-type resource to reserve; Ray itself uses the same."""


@dataclass(frozen=True)
class Need:
    """Processes that need the same: `each` has the resources of one by their names in Ray, `who` is one in words, and
    the `key` of the job says how many they are."""

    key: str
    who: str
    number: int
    each: Mapping[str, float]

    @property
    def many(self) -> str:
        return counted(self.number, self.who, self.who.replace("process", "processes") * ("process" in self.who))

    def __str__(self) -> str:
        each = " each" if self.number > 1 else ""
        return f"{self.many} need{'' if each else 's'} {in_words(self.each)}{each}"


def short_of(needs: Sequence[Need], nodes: Sequence[Mapping[str, float]]) -> tuple[Need, int] | None:
    """The first need that the nodes have too little room for, and their room; None if it may do. The last need is what
    all processes have in common."""
    common = set.intersection(*(set(need.each) for need in needs)) if needs else set[str]()
    least = {name: min(need.each[name] for need in needs) for name in common}
    several = [Need(needs[0].key, "process", sum(need.number for need in needs), least)] if len(needs) > 1 else []
    for need in [*needs, *several]:
        there = room_for(need.each, nodes)
        if need.each and there < need.number:
            return need, there
    return None


def missing(needs: Sequence[Need], nodes: Sequence[Mapping[str, float]], *, are: str = "free are") -> str:
    """What processes lack on nodes with these resources, in a line; "" if they may have room."""
    if (found := short_of(needs, nodes)) is None:
        return ""
    need, there = found
    alike = Counter(in_words({name: node.get(name, 0) for name in need.each}) for node in nodes)
    have = ", ".join(f"{text} on {number if number > 1 else 'one'} of them" for text, number in alike.items())
    of_all = "" if need in needs else f" ({' and '.join(one.many for one in needs)})"
    return f"{need}{of_all}; of {counted(len(nodes), 'node')}, {are} {have or 'none'}: room for {there}"


def room_for(each: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """How often these resources fit the nodes, each time in one of them."""
    return sum(
        min((int(node.get(name, 0) / amount + 1e-6) for name, amount in each.items() if amount), default=0)
        for node in nodes
    )


def in_words(amounts: Mapping[str, float]) -> str:
    """Resources as text; shares of an accelerator type are named without their amount."""
    parts = [f"{amount:g} {name}" for name, amount in amounts.items() if ":" not in name]
    kinds = [name.partition(":")[2] for name, amount in amounts.items() if ":" in name and amount]
    return " and ".join(parts) + (f" of type {', '.join(kinds)}" if kinds else "")
