"""The sleep cycle: from time to time the model replays what it has seen, and its experts are put in order.

A cycle replays rows of the reservoir, then merges twins, prunes the dormant, moves overlapping experts apart, and tries
a specialist for the rows that the model does worst on. Each of these is undone where it does not bring what it is for.
Every worker runs the same cycle on the same rows, and ends with what rank 0 has made of them.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from experts.lifecycle import policy
from experts.lifecycle.controller import Lifecycle
from experts.lifecycle.graph import EDGE_TYPES, ExpertGraph, Link
from experts.lifecycle.measures import clusters, coactivation, output_similarity, shared_rows, specialisation
from experts.lifecycle.replay import Reservoir
from experts.lifecycle.replayed_model import TEACHER, LayerView, Recorder, ReplayedModel, answer_of, row_uncertainty
from experts.lifecycle.table import Change
from raytrain.checkpoint.snapshot import before_update
from raytrain.train.memory.device import Shortage
from raytrain.train.step import TrainingStep
from raytrain.trainable import Batch, Notice, in_eval, rows

RECORD_EVERY = 4
"""Steps between those whose rows are offered to the reservoir: copying them to the host waits for the device."""
WORSE = 1.01
"""A change is undone where it raises the replay loss by more than this factor."""
BETTER = 0.99
"""A specialist stays where it lowers the replay loss below this part of what the same training brings without it."""
OVERLAP = 0.3
CONCEPTS = 6
BIRTHS_PER_1000 = (0.5, 10.0)
THRESHOLD_STEP = 1.05


# ---------------------------------------------------------------- decisions


def steps_to_next(every: int, *, living: float, first: float) -> int:
    """Steps until the next cycle: fewer where there are more experts than at the start, from half to twice `every`.

    Example:
        >>> from experts.lifecycle.sleep import steps_to_next
        >>> [steps_to_next(1000, living=living, first=4) for living in (1, 4, 5, 40)]
        [2000, 1000, 800, 500]
    """
    return max(1, round(min(2.0, max(0.5, first / max(1.0, living))) * every))


def next_threshold(threshold: float, *, births: int, steps: int) -> float:
    """The birth threshold for the time until the next cycle, so that births per 1,000 steps stay in
    `BIRTHS_PER_1000`: higher after too many of them, lower after too few, from 0.05 to 1."""
    rate, (low, high) = 1000 * births / max(1, steps), BIRTHS_PER_1000
    factor = THRESHOLD_STEP if rate > high else 1 / THRESHOLD_STEP if rate < low else 1.0
    return min(1.0, max(0.05, threshold * factor))


# ---------------------------------------------------------------- the cycle


@dataclass
class CycleRecord:
    """What one cycle did; becomes the event `sleep_cycle`."""

    step: int
    cycle: int
    rows: int = 0
    rows_at_once: int = 0
    batches: int = 0
    seconds: float = 0.0
    kept_rows: int = 0
    kept_bytes: int = 0
    loss_before: float | None = None
    loss_replayed: float | None = None
    loss_after: float | None = None
    uncertainty: list[int] = field(default_factory=list)
    merged: int = 0
    pruned: int = 0
    split: int = 0
    born: int = 0
    undone: list[str] = field(default_factory=list)
    pruned_share: float = 0.0
    living_before: list[int] = field(default_factory=list)
    living_after: list[int] = field(default_factory=list)
    rates: list[dict[int, float]] = field(default_factory=list)
    load: list[dict[int, float]] = field(default_factory=list)
    drift: list[float | None] = field(default_factory=list)
    threshold: float | None = None
    next_step: int = 0
    edges: dict[str, int] = field(default_factory=dict)
    graph: dict[str, Any] = field(default_factory=dict)


class SleepCycle:
    """Runs the cycles of a model; its state is a part of the checkpoint.

    Args:
        living: the lifecycle of the model's experts, all of them in this process; a cycle changes its table.
        recorder: keeps rows of each step.
    """

    def __init__(self, living: Lifecycle, recorder: Recorder) -> None:
        self.living, self.recorder = living, recorder
        self.config, self.least = living.cycle, living.config.least_living
        self.replay_config, self.routers = self.config.replay, living.loads.routers
        assert self.replay_config.bytes is not None
        self.layers = living.experts
        self.reservoir = Reservoir(self.replay_config.bytes, living.table.seed)
        self.graph = ExpertGraph()
        self.cycles, self.next_step, self.births_before = 0, self.replay_config.every, 0
        self._before = 0
        self._centres: list[Tensor | None] = [None] * len(self.routers)
        self._first = len(living.table.layers[0])
        self._set_nodes()

    # -- between steps ------------------------------------------------------------------------------

    def record(self, step: int, training: TrainingStep) -> None:
        """Offer the rows of this step to the reservoir: those of all workers, in the order of their ranks. Collective.

        A row that has not been measured counts as fully uncertain.
        """
        own = self.recorder.take()
        if step % RECORD_EVERY:
            return
        if own is not None and self.replay_config.targets == "teacher":
            with torch.no_grad(), in_eval(training.trainable.module):
                own[TEACHER] = answer_of(training, own)[0].float()
        parts = [own]
        if training.workers.world_size > 1:
            held = {name: value.detach().cpu().contiguous() for name, value in (own or {}).items()}
            gathered = training.workers.all_gather_bytes(safetensors.torch.save(held))
            parts = [safetensors.torch.load(one) for one in gathered]
        for part in parts:
            if part:
                self.reservoir.add(part, uncertainty=torch.ones(rows(part)), step=step)

    def after_step(self, step: int, training: TrainingStep) -> list[Notice]:
        """Keep rows of this step, and run a cycle if one is due; see `Trainable.sleep`. Collective."""
        self.record(step, training)
        if step < self.next_step or not len(self.reservoir):
            return []
        return [("sleep_cycle", asdict(self.run(step, training))), *self.living.notices()]

    def run(self, step: int, training: TrainingStep) -> CycleRecord:
        """Run a cycle. Collective: every worker runs it on the same rows, and ends with rank 0's weights."""
        begin, self.cycles = time.perf_counter(), self.cycles + 1
        self.living.close_interval(step)  # a cycle prunes by the uses until now, and slots may change hands in it
        self.living.carry_out(step)  # what was decided a moment ago
        before_update()
        # the size of a step's micro-batches is known to fit, also after it was halved for want of memory
        sizes = [size for size in training.workers.all_gather_object(self.recorder.micro_batch) if size]
        model = ReplayedModel(training, self.living, self.layers, step, at_once=min(sizes, default=1))
        self.recorder.asleep = True
        found = self._attempt(model)
        self.recorder.asleep = False
        self.recorder.take()
        self._take_rank_0(model)
        self._set_priors()
        self._before = step
        found.living_after = self._living()
        mean = sum(found.living_after) / len(found.living_after)
        self.next_step = found.next_step = step + steps_to_next(
            self.replay_config.every, living=mean, first=self._first
        )
        found.kept_rows, found.kept_bytes = len(self.reservoir), self.reservoir.bytes
        found.seconds = time.perf_counter() - begin
        return found

    def _attempt(self, model: ReplayedModel) -> CycleRecord:
        """Run the cycle, with half of the rows at once where a worker has no memory for it; the last resort is a record
        that says so. Collective."""
        training, put_back = model.training, self._everything(model)
        record = CycleRecord(model.step, self.cycles, living_before=self._living())
        while True:
            found = replace(record, rows_at_once=model.at_once, undone=[*record.undone])
            short = training.reduction.run_or_shortage(partial(self._sleep_eagerly, model, found))
            if not any(training.workers.all_gather_object(isinstance(short, Shortage))):
                return found
            then = f"; it went on with half of {model.at_once} rows at once" if model.at_once > 1 else ""
            record.undone.append(f"all: {training.reduction.dropped(short)}{then}")
            put_back()
            if model.at_once == 1:
                self._note_graph(record)
                return record
            model.at_once //= 2

    def _everything(self, model: ReplayedModel) -> Callable[[], None]:
        """Remember all that a cycle changes; returns what restores it."""
        restore, reservoir, living = model.save(), self.reservoir.uncertainty(), self.living
        graph, centres, births = self.graph.to_json(), list(self._centres), self.births_before
        threshold, window, notices = living.threshold, living.window, list(living.pending_notices)

        def put_back() -> None:
            restore()
            self.reservoir.update(torch.arange(len(reservoir)), reservoir)
            self.graph, self._centres, self.births_before = ExpertGraph.from_json(graph), list(centres), births
            living.threshold, living.window, living.pending_notices = threshold, window, list(notices)

        return put_back

    def _take_rank_0(self, model: ReplayedModel) -> None:
        """Go on with rank 0's result on every worker: sums on a device may differ in their last bits, and a decision
        with them. Collective."""
        workers, living = model.training.workers, self.living
        if workers.world_size == 1:
            return
        centres = [None if centre is None else centre.tolist() for centre in self._centres]
        own = [living.state_dict()["json"], self.graph.to_json(), centres, self.births_before]
        state, graph, centres, births = workers.broadcast_object(own)
        if workers.rank:
            living.load_state_dict({"json": state, "window": living.window})
            self.graph, self.births_before = ExpertGraph.from_json(graph), births
            self._centres = [None if centre is None else torch.tensor(centre).double() for centre in centres]
        kept = self.reservoir.uncertainty()
        statistics = [living.window, living.loads.window, living.loads.used]
        workers.broadcast([*model.tensors(), *statistics, kept])
        self.reservoir.update(torch.arange(len(kept)), kept)

    def _sleep_eagerly(self, model: ReplayedModel, found: CycleRecord) -> None:
        """With the same noise and dropout on every worker; afterwards each goes on with its own generator."""
        device, text = model.training.device, f"{self.living.table.seed} sleep {self.cycles}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        # hooks look into layers; torch's compiler takes two seconds to import where nothing is compiled
        compiles = "torch._dynamo" in sys.modules
        with (
            torch.compiler.set_stance("force_eager") if compiles else nullcontext(),
            torch.random.fork_rng([device] if device.type == "cuda" else []),
        ):
            torch.manual_seed(seed)
            self._sleep(model, found)

    def _sleep(self, model: ReplayedModel, found: CycleRecord) -> None:
        config, device = self.replay_config, model.training.device
        picked = self.reservoir.draw(config.rows, seed=self.cycles, priority=config.priority == "uncertainty")
        held = {name: value.to(device) for name, value in self.reservoir.rows(picked).items()}
        teacher = held.pop(TEACHER, None)
        losses = model.losses(held)
        self.reservoir.update(picked, row_uncertainty(losses))
        found.uncertainty = torch.histc(row_uncertainty(losses), 10, 0, 1).int().tolist()
        found.rows, found.loss_before = len(picked), float(losses.double().mean())
        found.batches = model.replay(held, teacher, lr=config.lr, size=config.batch_size)
        losses = model.losses(held)
        self.reservoir.update(picked, row_uncertainty(losses))
        found.loss_replayed = float(losses.double().mean())
        links = list[Link]()
        for layer, view in enumerate(model.view(held)):
            self._merge(model, found, held, layer, view)
            for change in policy.prunes(self.living.table, self.config, layer=layer, step=model.step, least=self.least):
                slot = self.living.table.slot(layer, change.ids[0])
                found.pruned_share += float(view.scores_TE[:, slot].mean())
                model.apply(change)
                self._stays(change, model.step)
                found.pruned += 1
            links += self._split(model, found, held, layer)
        self._specialist(model, found, held, teacher)
        found.loss_after = model.loss(held)
        links += self._look(model, found, held)
        births = sum(next_id - self._first for next_id in self.living.table.next_ids)
        now = self.living.threshold if self.living.threshold is not None else self.config.birth.uncertainty
        steps = (found.step - self._before) * len(self.routers)
        room = any(number < (self.config.max_experts or 0) for number in self._living())
        if now > 0 and room:  # at 0 a layer is filled whatever the router says; a full one has no births to steer
            self.living.threshold = next_threshold(now, births=births - self.births_before, steps=steps)
        self.births_before, found.threshold = births, self.living.threshold
        alive = self.graph.experts
        self.graph.renew([one for one in links if (one.layer, one.one) in alive and (one.layer, one.other) in alive])
        self.graph.fade(links)
        self._note_graph(found)

    def _note_graph(self, found: CycleRecord) -> None:
        found.edges = dict.fromkeys(EDGE_TYPES, 0)
        for edge in self.graph.edges():
            found.edges[edge["type"]] += 1
        found.graph = self.graph.to_json()

    # -- the parts of a cycle -----------------------------------------------------------------------

    def _merge(self, model: ReplayedModel, found: CycleRecord, held: Batch, layer: int, view: LayerView) -> None:
        wanted = self.config.merge.similarity
        ids = self.living.table.ids(layer)
        if wanted is None or len(ids) <= self.least:
            return
        values = output_similarity(model.outputs(layer, view.x_TD))
        pairs = [(float(values[a, b]), ids[a], ids[b]) for a in range(len(ids)) for b in range(a + 1, len(ids))]
        before = model.loss(held)
        # a newcomer is a copy of its parent: it has the cool-down of births to become another
        young = self.config.birth.cooldown_steps
        gone = {
            row.id
            for row in self.living.table.layers[layer]
            if row.parent is not None and model.step - row.born < young
        }
        for value, one, other in sorted(pairs, key=lambda pair: (-pair[0], pair[1:])):
            if value < wanted or gone & {one, other} or len(self.living.table.ids(layer)) <= self.least:
                continue
            reason = f"outputs on {len(view.x_TD)} replayed tokens with a cosine of {value:.4f}"
            weighted = policy.merge(self.living.table, layer, one, other, reason)
            # experts that compute the same with their hidden units in another order have no useful mean
            for change in (weighted, replace(weighted, share=1.0, reason=f"{reason}; the survivor's weights alone")):
                restore = model.save()
                model.apply(change)
                after = model.loss(held)
                if after <= WORSE * before:
                    self._stays(change, model.step)
                    gone |= {one, other}
                    before, found.merged = after, found.merged + 1
                    break
                restore()
            else:
                found.undone.append(f"merge of {one} and {other} in layer {layer}: loss {before:.4f} to {after:.4f}")

    def _split(self, model: ReplayedModel, found: CycleRecord, held: Batch, layer: int) -> list[Link]:
        """Move the router's rows of the two experts that overlap most along the line between their rows' centres."""
        table = self.living.table
        view = model.view(held)[layer]
        overlap = shared_rows(view.scores_TE, view.chosen_TK)
        living = table.layers[layer]
        pairs = [(float(overlap[a.slot, b.slot]), a, b) for n, a in enumerate(living) for b in living[n + 1 :]]
        worst = max(pairs, key=lambda pair: pair[0], default=None)
        if worst is None or worst[0] <= OVERLAP:
            return []
        before, one, other = worst
        first = view.chosen_TK[:, 0]
        if not bool((first == one.slot).any()) or not bool((first == other.slot).any()):
            return []
        x = view.x_TD.double().cpu()
        apart = x[first == one.slot].mean(0) - x[first == other.slot].mean(0)
        if float(apart.square().sum()) < 1e-12:
            return []
        restore, loss = model.save(), model.loss(held)
        weight = self.routers[layer].weight
        with torch.no_grad():  # the difference of their logits at the two centres grows by 1
            move = (apart / (2 * apart.square().sum())).to(weight)
            weight[one.slot] += move
            weight[other.slot] -= move
        view = model.view(held)[layer]
        after = float(shared_rows(view.scores_TE, view.chosen_TK)[one.slot, other.slot])
        if after >= before or model.loss(held) > WORSE * loss:
            restore()
            found.undone.append(
                f"split of {one.id} and {other.id} in layer {layer}: overlap {before:.3f} to {after:.3f}"
            )
            return []
        found.split += 1
        return [Link(layer, one.id, other.id, "specialization_split", 1.0 - after)]

    def _specialist(self, model: ReplayedModel, found: CycleRecord, held: Batch, teacher: Tensor | None) -> None:
        """Try an expert for the cluster of rows that the model does worst on; layers take turns."""
        layer = self.cycles % len(self.routers)
        table = self.living.table
        free, born = table.free_slots(layer), table.born[layer]
        if not free or len(table.ids(layer)) >= (self.config.max_experts or 0):
            return
        if born is not None and model.step - born < self.config.birth.cooldown_steps:
            return
        view = model.view(held)[layer]
        x = view.x_TD.double().cpu()
        centres, belongs = clusters(x, CONCEPTS, seed=self.cycles)
        losses = model.losses(held)[view.row_T].double()
        means = torch.stack([losses[belongs == number].mean() for number in range(len(centres))])
        worst = int(means.argmax())
        slots = view.chosen_TK[belongs == worst, 0]
        parent = min(table.layers[layer], key=lambda row: (-int((slots == row.slot).sum()), row.id))
        reason = (
            f"a specialist for {int((belongs == worst).sum())} of {len(x)} replayed tokens, whose loss is "
            f"{float(means[worst]):.4f} and that of all {float(losses.mean()):.4f}"
        )
        change = Change("birth", layer, (parent.id, table.next_ids[layer]), reason, slot=free[0])
        lr, size = self.replay_config.lr, self.replay_config.batch_size
        restore = model.save()
        model.replay(held, teacher, lr=lr, size=size)
        without = model.loss(held)
        restore()
        model.apply(change)
        weight = self.routers[layer].weight
        with torch.no_grad():  # its rows prefer it to its parent by 1, the others are as undecided as before
            towards = centres[worst] - x.mean(0)
            weight[free[0]] += (towards / towards.square().sum().clamp(min=1e-12)).to(weight)
        model.replay(held, teacher, lr=lr, size=size)
        with_it = model.loss(held)
        if with_it > BETTER * without:
            restore()
            found.undone.append(f"specialist in layer {layer}: loss {with_it:.4f}, {without:.4f} without it")
            return
        self._stays(change, model.step)
        found.born += 1

    def _look(self, model: ReplayedModel, found: CycleRecord, held: Batch) -> list[Link]:
        """Measure the experts as they are now: links, concepts, learning rates, drift."""
        links: list[Link] = []
        self._set_nodes()
        for layer, view in enumerate(model.view(held)):
            living, E = self.living.table.layers[layer], self.routers[layer].num_experts
            values, together = output_similarity(model.outputs(layer, view.x_TD)), coactivation(view.chosen_TK, E)
            centres, belongs = clusters(view.x_TD, CONCEPTS, seed=0)
            first = view.chosen_TK[:, 0]
            narrow = specialisation(first, belongs, E)
            counts = torch.zeros(len(centres), E, dtype=torch.float64)
            counts.index_put_((belongs, first), torch.ones(len(first), dtype=torch.float64), accumulate=True)
            own = counts / counts.sum(1, keepdim=True)
            mostly = counts.argmax(0)
            for n, a in enumerate(living):
                for m, b in enumerate(living[n + 1 :], n + 1):
                    links += [Link(layer, a.id, b.id, "similarity", float(values[n, m])),
                              Link(layer, a.id, b.id, "composition", float(together[a.slot, b.slot]))]  # fmt: skip
                    used = bool(counts[:, a.slot].any()) and bool(counts[:, b.slot].any())
                    if used and mostly[a.slot] == mostly[b.slot]:
                        least = float(torch.minimum(narrow[a.slot], narrow[b.slot]))
                        links.append(Link(layer, a.id, b.id, "specialization", least))
            shares = [
                {row.id: float(own[c, row.slot]) for row in living if counts[c, row.slot]} for c in range(len(centres))
            ]
            sizes = (counts.sum(1) / counts.sum()).tolist()
            named = [[round(value, 4) for value in centre[:8].tolist()] for centre in centres]  # enough in a record
            self.graph.set_concepts(layer, centres=named, rows=sizes, experts=shares)
            # a specialist, which has found its rows, changes at half the rate
            rates = {row.id: 1.0 - 0.5 * float(narrow[row.slot]) for row in living}
            for row in living:
                change = Change("rate", layer, (row.id,), "its specialisation", factor=rates[row.id])
                if rates[row.id] != row.rate:
                    model.apply(change)
            found.rates.append(rates)
            found.load.append({row.id: float((first == row.slot).double().mean()) for row in living})
            x = view.x_TD.double().cpu()  # how far its centre has moved since the last cycle, over the spread
            centre, before = x.mean(0), self._centres[layer]
            self._centres[layer] = centre
            spread = float((x - centre).norm(dim=1).mean())
            found.drift.append(None if before is None else float((centre - before).norm()) / max(spread, 1e-12))
        return links

    def _stays(self, change: Change, step: int) -> None:
        self.took([change])
        self.living.announce(change, self.living.table, step=step)

    def took(self, changes: Sequence[Change]) -> None:
        """Carry changes of experts over to the graph, also those that were decided outside of a cycle."""
        for change in changes:
            nodes = [(change.layer, expert) for expert in change.ids]
            if change.kind == "birth":
                for node in nodes:
                    self.graph.experts.add_node(node)
                parent, newcomer = change.ids
                self.graph.renew([Link(change.layer, parent, newcomer, "dependency", 1.0)])
            elif change.kind in ("merge", "prune") and nodes[-1] in self.graph.experts:
                self.graph.remove(nodes[-1], heir=nodes[0] if change.kind == "merge" else None)
        if self.cycles:
            self._set_priors()

    def _set_priors(self) -> None:
        """Have each router prefer experts that the graph links to those with high scores, if the section says so."""
        weight = self.living.config.graph_routing
        for layer, router in enumerate(self.routers if weight else ()):
            prior = torch.zeros(router.num_experts, router.num_experts)
            for one in self.living.table.layers[layer]:
                for other in self.living.table.layers[layer]:
                    if one is not other:
                        prior[one.slot, other.slot] = self.graph.affinity((layer, one.id), (layer, other.id))
            sums = prior.sum(1, keepdim=True).clamp(min=1e-12)
            assert router.prior_EE is not None
            router.prior_EE.copy_(weight * prior / sums)

    def _set_nodes(self) -> None:
        rows = [(layer, row) for layer, living in enumerate(self.living.table.layers) for row in living]
        self.graph.set_experts({(layer, row.id): {"uses": row.uses, "born": row.born} for layer, row in rows})

    def _living(self) -> list[int]:
        return [len(rows) for rows in self.living.table.layers]

    # -- checkpoint ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "reservoir": self.reservoir.state_dict(),
            "graph": self.graph.to_json(),
            "numbers": [self.cycles, self.next_step, self.births_before, self._before, self._first],
            "threshold": self.living.threshold,
            "centres": list(self._centres),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reservoir.load_state_dict(state["reservoir"])
        self.graph = ExpertGraph.from_json(state["graph"])
        self.cycles, self.next_step, self.births_before, self._before, self._first = state["numbers"]
        self.living.threshold = state["threshold"]
        self._centres = list(state["centres"])
        if self.cycles:
            self._set_priors()
