"""Carries out changes: what the state of a newcomer, of merged experts and of an empty slot is, in experts and routers.

The same functions run wherever experts live, so that the result does not depend on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experts.config import Key
from experts.grouped import GroupedExperts, Optimizers, State, load_row, load_state, row_of, state_of
from experts.lifecycle.table import Change, ExpertTable
from experts.router import TopKRouter

Slot = Callable[[Key], tuple[GroupedExperts, int]]
"""(layer, slot) -> the stack that holds it here, and its place in that."""
NOISE = 0.1
"""Of a newcomer's weights, over the root mean square of its parent's: their cosine is 0.995."""


# ---------------------------------------------------------------- states


def newborn(parent: State, generator: torch.Generator) -> dict[str, Tensor]:
    """A copy of a parent with noise in its weights, and moments of its own, which are zero."""
    found = {}
    for name, value in sorted(parent.items()):  # one order of draws: that of a state that was sent may differ
        if name.rpartition(".")[1]:
            found[name] = torch.zeros_like(value) if value.ndim else value.clone()
            continue
        size = value.double().square().mean().sqrt()
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        found[name] = (value.double() + NOISE * size * noise).to(value.dtype)
    return found


def merged(survivor: State, gone: State, *, share: float) -> dict[str, Tensor]:
    """The weighted mean of two states, moments too; `share` is the survivor's. Counts of steps are the survivor's."""
    return {
        name: torch.lerp(gone[name].to(value), value, share) if value.ndim and name in gone else value.clone()
        for name, value in survivor.items()
    }


def emptied(state: State) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) if value.ndim else value.clone() for name, value in state.items()}


def noise_of(table: ExpertTable, change: Change, *, step: int, part: str) -> torch.Generator:
    """The generator of a newcomer's noise, which depends on nothing but these values and the seed of the table."""
    text = f"{table.seed} {step} {change.layer} {change.ids[-1]} {part}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- experts


def needed_states(changes: Iterable[Change], table: ExpertTable) -> list[tuple[Key, Key]]:
    """What changes read besides the slots that they write, parents and experts that go in a merge: (its slot, the slot
    that is made from it). The former may be in another process."""
    found = []
    for change in changes:
        layer = change.layer
        if change.kind == "birth":
            assert change.slot is not None
            found.append(((layer, table.slot(layer, change.ids[0])), (layer, change.slot)))
        elif change.kind == "merge":
            kept, gone = (table.slot(layer, expert) for expert in change.ids)
            found.append(((layer, gone), (layer, kept)))
    return found


def change_experts(
    slot: Slot, optimizers: Optimizers, changes: Sequence[Change], table: ExpertTable, *, step: int,
    held: Callable[[Key], bool] = lambda _key: True, fetched: Mapping[tuple[Key, Key], State] | None = None,
) -> None:  # fmt: skip
    """Carry out changes in the experts held here; `table` is that of before them.

    Args:
        held: whether the slot's home is here.
        fetched: the states of `needed_states` that are not held here.
    """

    def read(source: Key, target: Key) -> State:
        if held(source):
            return state_of(*slot(source), optimizers)
        assert fetched is not None
        return fetched[source, target]

    def write(target: Key, state: State) -> None:
        load_state(*slot(target), optimizers, state)

    for change in changes:
        layer = change.layer
        slots = [(layer, row.slot) for expert in change.ids for row in table.layers[layer] if row.id == expert]
        if change.kind == "birth":
            assert change.slot is not None
            target = (layer, change.slot)
            if held(target):
                generator = noise_of(table, change, step=step, part="expert")
                write(target, newborn(read(slots[0], target), generator))
        elif change.kind == "merge":
            kept, gone = slots
            if held(kept):
                write(kept, merged(read(kept, kept), read(gone, kept), share=change.share))
        if change.kind in ("merge", "prune") and held(slots[-1]):
            write(slots[-1], emptied(read(slots[-1], slots[-1])))
        table = table.after([change], step=step)


# ---------------------------------------------------------------- routers


@torch.no_grad()
def change_router(router: TopKRouter, optimizers: Optimizers, change: Change, table: ExpertTable, *, step: int) -> None:
    """Carry out a change in the router of its layer; `table` is that of before it."""
    if change.kind == "rate":
        return
    assert router.open_E is not None
    first = table.slot(change.layer, change.ids[0])
    own, bias_E, shares_E = row_of(router.weight, first, optimizers), router.bias_E, router.shares_E
    if change.kind == "birth":
        assert change.slot is not None
        generator = noise_of(table, change, step=step, part="router")
        load_row(router.weight, change.slot, optimizers, newborn(own, generator))
        bias_E[change.slot] = bias_E[first]
        if change.opens:
            shares_E[first] = shares_E[change.slot] = shares_E[first] / 2
            router.open_E[change.slot] = True
        return
    last = table.slot(change.layer, change.ids[-1])
    gone = row_of(router.weight, last, optimizers)
    if change.kind == "merge":
        load_row(router.weight, first, optimizers, merged(own, gone, share=change.share))
        bias_E[first] = torch.lerp(bias_E[last], bias_E[first], change.share)
        shares_E[first] += shares_E[last]
    load_row(router.weight, last, optimizers, emptied(gone))
    bias_E[last] = shares_E[last] = 0.0
    router.open_E[last] = False


# ---------------------------------------------------------------- learning rates


def scale_steps(targets: Callable[[], list[tuple[nn.Parameter, int, float]]], optimizers: Optimizers) -> None:
    """From now on scale the steps of these optimizers in single experts: of each, w becomes w + factor x (its step).

    Args:
        targets: (parameter, place, factor) of each expert whose factor is not 1.
    """
    for optimizer in optimizers:
        kept: list[tuple[Tensor, Tensor, float]] = []

        def keep(optimizer: torch.optim.Optimizer, *_: Any, kept: list[tuple[Tensor, Tensor, float]] = kept) -> None:
            wanted = targets()
            if wanted:
                mine = {id(one) for group in optimizer.param_groups for one in group["params"]}
                rows = ((one.detach()[place], factor) for one, place, factor in wanted if id(one) in mine)
                kept[:] = [(row, row.clone(), factor) for row, factor in rows]

        def scale(*_: Any, kept: list[tuple[Tensor, Tensor, float]] = kept) -> None:
            for row, before, factor in kept:
                row.copy_(torch.lerp(before, row, factor))
            kept.clear()

        optimizer.register_step_pre_hook(keep)
        optimizer.register_step_post_hook(scale)


def scaled_experts(
    slot: Slot, table: ExpertTable, held: Callable[[Key], bool] = lambda _key: True
) -> list[tuple[nn.Parameter, int, float]]:
    """The targets of `scale_steps` among the experts held here."""
    found = []
    for layer, rows in enumerate(table.layers):
        for row in rows:
            if row.rate != 1.0 and held((layer, row.slot)):
                stack, place = slot((layer, row.slot))
                found += [(getattr(stack, name), place, row.rate) for name in stack.names]
    return found
