"""The model while it sleeps: which of its rows are recorded, and what the replayed ones show of it.

`ReplayedModel` trains a model on rows of the reservoir, measures it on them, and changes its experts; what is changed
can be restored. Every member does so to its own copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experts.grouped import GroupedExperts, UnevenExperts, run_expert
from experts.lifecycle.changes import change_experts, change_router
from experts.lifecycle.controller import Lifecycle
from experts.lifecycle.replay import OWN_BYTES, kept_at_most, row_bytes
from experts.lifecycle.table import Change
from experts.router import Routing, TopKRouter
from raytrain.train.step import TrainingStep
from raytrain.trainable import IGNORED_LABEL, Batch, GlobalStep, LossOutput, MicroBatch, in_eval, is_integer, rows

ROWS_A_STEP = 64
"""Rows of a step that are recorded, at most."""
MEASURED_TOKENS = 512
"""Tokens of the replayed rows that experts are compared on."""
TEACHER = "teacher_logits"


class Recorder:
    """Wraps a model's loss: the first rows of the last micro-batch of each step are kept until its end.

    Raises InputError in its first pass where not even one of these rows fits into the reservoir.

    Args:
        limit: bytes of the reservoir.

    Attributes:
        micro_batch: rows of the largest micro-batch of the last step, which is known to fit into memory.
    """

    def __init__(self, loss: Callable[..., LossOutput], limit: int) -> None:
        self._loss, self._limit, self._fits = loss, limit, False
        self.rows: dict[str, Tensor] | None = None
        self.asleep = False
        self.micro_batch = self._largest = 0

    def __call__(self, module: nn.Module, batch: Batch, **given: Any) -> LossOutput:
        if module.training and not self.asleep:
            takes = inspect.signature(module.forward).parameters  # a replay calls it with the columns by name
            every = any(one.kind is one.VAR_KEYWORD for one in takes.values())
            known = {name: value for name, value in batch.items() if every or name in takes or name == "labels"}
            self._largest = max(self._largest, rows(batch))
            self.rows = {name: value[:ROWS_A_STEP] for name, value in known.items() if isinstance(value, Tensor)}
            self._fits = self._fits or kept_at_most(self._limit, row_bytes(self.rows) + OWN_BYTES) > 0
        return self._loss(module, batch, **given)

    def take(self) -> dict[str, Tensor] | None:
        """End a step: its rows."""
        rows, self.rows, self.micro_batch, self._largest = self.rows, None, self._largest, 0
        return rows


def answer_of(training: TrainingStep, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """(logits (B, ..., C), the sum of the auxiliary losses or None) of a model that returns a dict with "logits", or a
    tuple of both, without labels."""
    module = training.trainable.module
    with training.policy.autocast(training.device):
        found = module(**{name: value for name, value in batch.items() if name != "labels"})
    return found if isinstance(found, tuple) else (found["logits"], found.get("aux"))


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row, (B,): mean over its labels; 0 for a row without any."""
    if not is_integer(labels):
        return (logits.float() - labels.view_as(logits).float()).square().flatten(1).mean(1)
    losses = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED_LABEL,
                             reduction="none").view(labels.shape)  # fmt: skip
    counted = (labels != IGNORED_LABEL).view(len(labels), -1).sum(1).clamp(min=1)
    return losses.view(len(labels), -1).sum(1) / counted


def _divergence(logits: Tensor, goal: Tensor, labels: Tensor) -> Tensor:
    """How far an answer is from the teacher's: of classes where there is a label, or the squared error of numbers."""
    if not is_integer(labels):
        return F.mse_loss(logits, goal)
    counted = labels.flatten() != IGNORED_LABEL
    own, theirs = (one.log_softmax(-1).flatten(0, -2)[counted] for one in (logits, goal))
    return F.kl_div(own, theirs, log_target=True, reduction="sum") / counted.sum().clamp(min=1)


def row_uncertainty(losses_B: Tensor) -> Tensor:
    """How unsure a model is of each row, 0 to 1: one minus the probability (geometric mean) of its labels."""
    return 1.0 - torch.exp(-losses_B)


# ---------------------------------------------------------------- one layer


@dataclass(frozen=True)
class LayerView:
    """What the replayed rows show of one layer.

    Attributes:
        x_TD: inputs. scores_TE, chosen_TK: of the router. row_T: the replayed row that each token is of.
    """

    x_TD: Tensor
    scores_TE: Tensor
    chosen_TK: Tensor
    row_T: Tensor


@dataclass
class ReplayedModel:
    """The model during a cycle: its layers, their experts, and its optimizers; every member changes its own copy.
    `at_once` rows go through the model together."""

    training: TrainingStep
    living: Lifecycle
    layers: list[GroupedExperts | UnevenExperts]
    step: int
    at_once: int

    @property
    def routers(self) -> list[TopKRouter]:
        return self.living.loads.routers

    def apply(self, change: Change) -> None:
        optimizers, table = self.training.optimizers, self.living.table
        self.living.clear(change, table)
        change_experts(self.living.slot, optimizers, [change], table, step=self.step)
        change_router(self.routers[change.layer], optimizers, change, table, step=self.step)
        self.living.table = table.after([change], step=self.step)

    def tensors(self) -> list[Tensor]:
        """The weights and buffers, and the optimizers' state, in an order that is the same on every worker."""
        held = [one for one in self.training.trainable.module.state_dict().values() if isinstance(one, Tensor)]
        for optimizer in self.training.optimizers:
            states = (optimizer.state.get(one, {}) for group in optimizer.param_groups for one in group["params"])
            held += [state[name] for state in states for name in sorted(state) if isinstance(state[name], Tensor)]
        return held

    def save(self) -> Callable[[], None]:
        """Remember weights, buffers, optimizer state and table, in host memory; returns what restores them."""
        table, loads = self.living.table, self.living.loads
        statistics = loads.window, loads.used
        held = [value.detach().to("cpu", copy=True) for value in self.tensors()]
        numbers = [
            (state, {name: value for name, value in state.items() if not isinstance(value, Tensor)})
            for optimizer in self.training.optimizers
            for state in optimizer.state.values()
        ]

        @torch.no_grad()
        def restore() -> None:
            for value, before in zip(self.tensors(), held, strict=True):  # a change may have replaced the tensor
                value.copy_(before)
            for state, before in numbers:
                state.update(before)
            self.living.table = table
            loads.window, loads.used = statistics

        return restore

    def losses(self, batch: Batch) -> Tensor:
        """The loss of each row in evaluation, (B,), on the host."""
        found = []
        with torch.no_grad(), in_eval(self.training.trainable.module):
            for part in batches(batch, self.at_once):
                found.append(row_losses(answer_of(self.training, part)[0], part["labels"]).cpu())
        return torch.cat(found)

    def loss(self, batch: Batch) -> float:
        return float(self.losses(batch).double().mean())

    def replay(self, batch: Batch, teacher: Tensor | None, *, lr: float, size: int) -> int:
        """Train on these rows once, in batches of `size`, towards their labels or the teacher's logits. The run's
        optimizers take the steps, at another learning rate. Returns their number."""
        number, training = 0, self.training
        peak = max(group["lr"] for optimizer in training.optimizers for group in optimizer.param_groups) or 1.0
        for part in batches(batch if teacher is None else {**batch, TEACHER: teacher.to(training.device)}, size):
            pieces = list(batches(part, self.at_once))
            # labels that a loss is a mean over; rows, where they are numbers
            labels = [piece["labels"] for piece in pieces]
            weights = [int((one != IGNORED_LABEL).sum()) if is_integer(one) else len(one) for one in labels]
            micros = [
                MicroBatch(piece, weight, last=piece is pieces[-1])
                for piece, weight in zip(pieces, weights, strict=True)
            ]
            if not sum(weights):
                continue
            if teacher is None:
                passed = training.backward(micros, global_weight=sum(weights))
                if passed.told and passed.weight > 0:  # the loss is a mean over something else
                    training.gradients.scale_(torch.tensor(sum(weights) / passed.weight, device=training.device))
            else:
                self._backward_to(micros, sum(weights))
            self._optimizer_step(lr / peak)
            number += 1
        for router in self.routers:
            router.pending_counts.zero_()
        return number

    def _backward_to(self, micros: Sequence[MicroBatch], weight: int) -> None:
        """Backward of the divergence from the teacher's answer, in place of the labels' loss."""
        training, size = self.training, sum(rows(micro.batch) for micro in micros)
        training.gradients.zero_()
        for number, micro in enumerate(micros):
            goal = micro.batch.pop(TEACHER)
            logits, aux = answer_of(training, micro.batch)
            loss = _divergence(logits.float(), goal, micro.batch["labels"])
            total = loss * (micro.weight / weight)
            if aux is not None:  # a mean over all rows, as they have no labels here
                total = total + aux * (rows(micro.batch) / size)
            training.gradients.several = number > 0 or not micro.last
            training.gradients.attach()
            training.scale.scale(total).backward()
            training.gradients.take()

    @torch.no_grad()
    def _optimizer_step(self, factor: float) -> None:
        training = self.training
        if training.scale.enabled:
            training.gradients.scale_(training.scale.inverse)
        squares = training.reduction.sum_of_squares()
        groups = [group for optimizer in training.optimizers for group in optimizer.param_groups]
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        training.step_optimizers(GlobalStep(norm=squares.sqrt(), skip=~torch.isfinite(squares), counts=None))
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr

    @torch.no_grad()
    def view(self, batch: Batch) -> list[LayerView]:
        """Run as many of the rows in evaluation as it takes to see `MEASURED_TOKENS`, and look at each layer."""
        tokens = max(1, batch["labels"].numel() // rows(batch))
        batch = next(batches(batch, max(16, MEASURED_TOKENS // tokens)))
        inputs, chosen = ([[] for _ in self.routers] for _ in range(2))
        module = self.training.trainable.module
        with ExitStack() as stack:
            for number, router in enumerate(self.routers):

                def look(router: nn.Module, args: Any, routing: Routing, number: int = number) -> None:
                    inputs[number].append(args[0].detach())
                    chosen[number].append(routing.indices_TK)

                stack.callback(router.register_forward_hook(look).remove)
            stack.enter_context(in_eval(module))
            for part in batches(batch, self.at_once):
                answer_of(self.training, part)
        views = []
        for router, parts, choices in zip(self.routers, inputs, chosen, strict=True):
            if parts:
                x_BSD, chosen_TK = torch.cat(parts), torch.cat(choices)
                tokens = x_BSD.shape[0] * x_BSD.shape[1]
                picked = torch.arange(0, tokens, max(1, -(-tokens // MEASURED_TOKENS)), device=x_BSD.device)
                x_TD = x_BSD.reshape(tokens, -1)[picked]
                scores = router.scores(x_TD.unsqueeze(1)).squeeze(1)
                row_T = (picked // x_BSD.shape[1]).cpu()
                views.append(LayerView(x_TD.float(), scores.double().cpu(), chosen_TK[picked].cpu(), row_T))
        return views

    @torch.no_grad()
    def outputs(self, layer: int, x_TD: Tensor) -> Tensor:
        """What each living expert answers to the same inputs, (living, T, D), in the order of their ids."""
        experts = self.layers[layer]
        answers = []
        for row in self.living.table.layers[layer]:
            stack, place = experts.slot(row.slot)
            weights = {name: value.float() for name, value in stack.weights_of(place).items()}
            answers.append(run_expert(x_TD.float(), weights, experts.activation))
        return torch.stack(answers)


def batches(batch: Batch, size: int) -> Iterator[Batch]:
    for start in range(0, rows(batch), size):
        yield {name: value[start : start + size] for name, value in batch.items()}
