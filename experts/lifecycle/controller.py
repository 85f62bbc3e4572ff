"""One worker's part in the lifecycle of experts: keeps table and statistics, decides, and changes what it holds.

Every worker decides by the same policy from the same global counts, so all decide alike; a hash of the table, summed
with the counts of each step, shows whether they do. What is decided after one step is announced with the vote on the
next one and done at its end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from experts.config import ExpertsConfig, Key
from experts.grouped import GroupedExperts, UnevenExperts
from experts.lifecycle.changes import change_experts, change_router, scale_steps, scaled_experts
from experts.lifecycle.policy import LayerStatistics, decide
from experts.lifecycle.table import Change, ExpertTable, TableMismatch
from experts.router import UNCERTAINTY_UNIT, LoadTracker
from experts.sizes import first_experts
from raytrain.errors import InputError
from raytrain.trainable import GlobalStep, Notice

EVENTS = {"birth": "expert_born", "merge": "expert_merged", "prune": "expert_pruned", "rate": "expert_rate"}


def extra_counts(layers: int) -> int:
    """Numbers behind a step's counts: the uncertainty of each layer, the number of workers, their tables' hashes."""
    return layers + 2


class Lifecycle:
    """The lifecycle of a model's experts on one worker.

    Args:
        config: the `experts` section.
        loads: of the model's routers.
        experts: of each layer, while they are in this process.

    Attributes:
        table: agreed by everybody.
        pending: decided, and done at the end of the next step.
        local: whether all experts are in this process; otherwise their holders change them (`StepCommit`).
        threshold: of births, instead of the section's.
        sleep: called after each step, `sleep(step)`, returns changes that it wants; None never.
    """

    def __init__(self, config: ExpertsConfig, loads: LoadTracker, experts: Sequence[nn.Module]) -> None:
        self.config, self.loads = config, loads
        self.cycle = config.lifecycle
        number = len(loads.routers)
        self.table = ExpertTable.start(
            first_experts(config), layers=number, slots=loads.routers[0].num_experts, seed=torch.initial_seed(),
        )  # fmt: skip
        self.pending: list[Change] = []
        self.local = True
        self.threshold: float | None = None
        self.sleep: Callable[[int], Sequence[Change]] | None = None
        self.took: Callable[[Sequence[Change]], None] | None = None
        """Is called with the changes that were done."""
        self.experts = [layer for layer in experts if isinstance(layer, GroupedExperts | UnevenExperts)]
        self._optimizers: list[torch.optim.Optimizer] = []
        self._size = sum(loads.sizes)
        self._first: list[float | None] = [None] * number
        self._lowest = [1.0] * number
        self.window = torch.zeros(self._size + number, dtype=torch.float64)
        """Counts of all layers since the last decision, and behind them the uncertainty of each."""
        self._vote: tuple[int, Tensor] | None = None
        self.pending_notices: list[Notice] = []
        """Events that `notices` has not returned yet."""

    # -- a step -------------------------------------------------------------------------------------------

    def use(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Change the state of these optimizers with their parameters.

        Raises:
            InputError: the routers have other slots open than the table says, as weights of a run that grew do.
        """
        # weights have no table of experts; with one of a new model a birth would overwrite experts that are alive
        for layer, router in enumerate(self.loads.routers):
            assert router.open_E is not None
            seen = router.open_E.nonzero().flatten().tolist()
            expected = sorted(row.slot for row in self.table.layers[layer])
            if seen != expected:
                raise InputError(
                    "model.init_from", got=f"weights whose layer {layer} has experts in slots {seen}",
                    expected=f"experts in slots {expected}, as a run with these experts.num_experts starts",
                    remedy="go on with the run that they are of (--resume), or name one whose experts did not change",
                )  # fmt: skip
        self._optimizers = optimizers
        if self.local:
            scale_steps(lambda: scaled_experts(self.slot, self.table), optimizers)

    def slot(self, key: Key) -> tuple[GroupedExperts, int]:
        """(the stack that holds a slot in this process, its place in that)."""
        return self.experts[key[0]].slot(key[1])

    def counts(self) -> Tensor:
        """This worker's counts since the last commit, see `extra_counts`; int64."""
        counts = self.loads.pending()
        doubt = torch.stack([router.pending_counts[-1] for router in self.loads.routers])
        own = self.next_table(self.loads.step + 1).hash()
        if self._vote is None or self._vote[0] != own:  # copied to the device after a change only
            self._vote = own, torch.tensor([1, own], dtype=torch.int64, device=counts.device)
        return torch.cat([counts, doubt, self._vote[1]])

    def next_table(self, step: int) -> ExpertTable:
        """The table after the pending changes, done at the end of `step`."""
        return self.table.after(self.pending, step=step)

    @torch.no_grad()
    def commit(self, agreed: GlobalStep) -> None:
        """End a step with the counts of all workers.

        Raises:
            TableMismatch: the workers' tables differ.
        """
        counts = agreed.counts
        self.loads.commit(agreed if counts is None else replace(agreed, counts=counts[: self._size]))
        step = self.loads.step
        if counts is not None:
            done = counts[:-2].double() * ~torch.as_tensor(agreed.skip, device=counts.device)
            self.window = self.window.to(done.device) + done
            if self.pending:
                workers, total = counts[-2:].tolist()
                if total != workers * self.next_table(step).hash():
                    raise TableMismatch(
                        f"step {step}: the tables of experts of {workers} workers differ after {self.pending}"
                    )
                self.carry_out(step)
        wanted = [] if self.sleep is None else self.sleep(step)
        if step % self.cycle.every == 0:
            statistics = self.close_interval(step)
            table, least = self.next_table(step + 1), self.config.least_living
            decided = decide(statistics, table, self.cycle, step=step, least=least, threshold=self.threshold)
            wanted = [*wanted, *decided]
        self.request(wanted)

    def request(self, changes: Sequence[Change]) -> None:
        """Have these changes done at the end of the next step; every worker asks for the same.

        Raises:
            ValueError: they do not fit the table, or an expert takes part in two of them.
        """
        taken = [(change.layer, expert) for change in [*self.pending, *changes] for expert in change.ids]
        if len(set(taken)) < len(taken):
            raise ValueError(f"an expert takes part in two changes of one step: {[*self.pending, *changes]}")
        self.table.after([*self.pending, *changes], step=self.loads.step + 1)
        self.pending += changes

    def close_interval(self, step: int) -> list[LayerStatistics]:
        """Count the uses of the interval that ends with `step`, and begin another; one read from the device."""
        values, start, statistics = self.window.tolist(), 0, []
        self.window = torch.zeros_like(self.window)
        rows = []
        for layer, (router, size) in enumerate(zip(self.loads.routers, self.loads.sizes, strict=True)):
            own = [int(count) for count in values[start : start + size - 1]]
            start += size
            rows.append(own)
            tokens, doubt = sum(own) / router.top_k, values[self._size + layer] / UNCERTAINTY_UNIT
            uncertainty = doubt / tokens if tokens else None
            if uncertainty is not None:
                first = self._first[layer]
                self._first[layer] = uncertainty if first is None else first
                self._lowest[layer] = min(self._lowest[layer], uncertainty)
            first = self._first[layer]
            statistics.append(
                LayerStatistics(tuple(own), uncertainty, 1.0 if first is None else first, self._lowest[layer])
            )
        self.table = self.table.count_uses(rows, step=step, least_share=self.cycle.prune.least_share)
        return statistics

    @torch.no_grad()
    def carry_out(self, step: int) -> None:
        """Do the pending changes in what this worker holds; does nothing where there are none."""
        changes, after = self.pending, self.next_table(step)
        if not changes:
            return
        if self.local:
            change_experts(self.slot, self._optimizers, changes, self.table, step=step)
        before = self.table
        for change in changes:
            table = before.after([change], step=step)
            self.clear(change, before)
            change_router(self.loads.routers[change.layer], self._optimizers, change, before, step=step)
            self.announce(change, table, step=step)
            before = table
        self.table, self.pending = after, []
        if self.took is not None:
            self.took(changes)

    def clear(self, change: Change, table: ExpertTable) -> None:
        """Have the statistics of slots follow a change: an expert that goes leaves none to the next one in its slot,
        and its rows are its survivor's after a merge. `table` is that of before the change."""
        if change.kind not in ("merge", "prune"):
            return
        layer, start = change.layer, sum(self.loads.sizes[: change.layer])
        slots = [table.slot(layer, expert) for expert in (change.ids[-1], change.ids[0])]
        self.loads.forget(layer, slots[0], heir=slots[1] if change.kind == "merge" else None)
        window, (gone, first) = self.window.clone(), (start + slot for slot in slots)  # as in `forget`
        if change.kind == "merge":
            window[first] += window[gone]
        else:  # the doubt of its tokens goes too, so that the mean stays
            total = window[start : start + self.loads.sizes[layer] - 1].sum().clamp(min=1)
            window[self._size + layer] *= 1 - window[gone] / total
        window[gone] = 0.0
        self.window = window

    def announce(self, change: Change, table: ExpertTable, *, step: int) -> None:
        """Have an event written for a change; `table` is that of after it."""
        row = {"step": step, "layer": change.layer, "ids": list(change.ids), "reason": change.reason}
        self.pending_notices.append((EVENTS[change.kind], {**row, "count": len(table.layers[change.layer])}))

    # -- what others read ---------------------------------------------------------------------------------

    def rows_since(self) -> list[list[float]]:
        """Rows of each layer's slots since the last decision; reads the device."""
        return [part[:-1].tolist() for part in self.window[: self._size].split(self.loads.sizes)]

    def notices(self) -> list[Notice]:
        """An event for each change since the last call, as (kind, fields)."""
        taken, self.pending_notices = self.pending_notices, []
        return taken

    def ids(self) -> list[list[int | None]]:
        """Of each layer the id of the expert in each slot."""
        return [self.table.ids_by_slot(layer) for layer in range(len(self.table.layers))]

    def state_dict(self) -> dict[str, Any]:
        own = {
            "table": self.table.to_json(), "pending": [change.to_json() for change in self.pending],
            "first": self._first, "lowest": self._lowest, "threshold": self.threshold,
        }  # fmt: skip
        return {"json": json.dumps(own), "window": self.window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = json.loads(state["json"])
        self.table = ExpertTable.from_json(own["table"])
        self.pending = [Change.from_json(row) for row in own["pending"]]
        self._first, self._lowest, self.threshold = own["first"], own["lowest"], own["threshold"]
        self.window = state["window"].clone()
        self.pending_notices, self._vote = [], None
