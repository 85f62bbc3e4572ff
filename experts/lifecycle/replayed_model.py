"""The model while it sleeps: which of its rows are recorded, and what the replayed ones show of it.

`ReplayedModel` trains a model on rows of the reservoir, measures it on them, and changes its experts; what is changed
can be restored. Every member does so to its own copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experts.grouped import GroupedExperts, UnevenExperts, run_expert
from experts.lifecycle.changes import LocalExperts, change_experts, change_router
from experts.lifecycle.controller import Lifecycle
from experts.lifecycle.table import Change
from experts.router import Routing, TopKRouter
from raytrain.train.step import TrainingStep
from raytrain.trainable import IGNORED_LABEL, Batch, LossOutput, MicroBatch, in_eval, is_integer, rows

ROWS_A_STEP = 64
"""Rows of a step that are recorded, at most."""
MEASURED_TOKENS = 512
"""Tokens of the replayed rows that experts are compared on."""
TEACHER = "teacher_logits"


class Recorder:
    """Wraps a model's loss: the first rows of the last micro-batch of each step are kept until its end."""

    def __init__(self, loss: Callable[..., LossOutput]) -> None:
        self._loss = loss
        self.rows: dict[str, Tensor] | None = None
        self.asleep = False

    def __call__(self, module: nn.Module, batch: Batch, **given: Any) -> LossOutput:
        """The loss, as without it."""
        if module.training and not self.asleep:
            known = _inputs(module, batch)
            self.rows = {name: value[:ROWS_A_STEP] for name, value in known.items() if isinstance(value, Tensor)}
        return self._loss(module, batch, **given)

    def take(self) -> dict[str, Tensor] | None:
        """The rows since the last call."""
        rows, self.rows = self.rows, None
        return rows


def _inputs(module: nn.Module, batch: Batch) -> Batch:
    """The labels and the columns that `module.forward` takes: a replay calls it with them by name."""
    takes = inspect.signature(module.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        return batch
    return {name: value for name, value in batch.items() if name in takes or name == "labels"}


@dataclass(frozen=True)
class Answer:
    """What a model returned: `logits` (B, ..., C), and the sum of its auxiliary losses, or None."""

    logits: Tensor
    aux: Tensor | None


def answer_of(training: TrainingStep, batch: Batch) -> Answer:
    """Run a model that returns a dict with "logits", or a tuple (outputs, aux), without labels."""
    module = training.trainable.module
    with training.policy.autocast(training.device):
        found = module(**{name: value for name, value in batch.items() if name != "labels"})
    return Answer(*found) if isinstance(found, tuple) else Answer(found["logits"], found.get("aux"))


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
    """The model during a cycle: its layers, their experts, and its optimizers; every member changes its own copy."""

    training: TrainingStep
    living: Lifecycle
    layers: list[GroupedExperts | UnevenExperts]
    step: int

    @property
    def routers(self) -> list[TopKRouter]:
        """Of the layers."""
        return self.living.loads.routers

    def apply(self, change: Change) -> None:
        """Carry out a change."""
        optimizers, table = self.training.optimizers, self.living.table
        states = LocalExperts(self.layers, optimizers)
        self.living.clear(change, table)
        change_experts(states, [change], table, step=self.step, held=lambda key: True, fetched={})
        change_router(self.routers[change.layer], optimizers, change, table, step=self.step)
        self.living.table = table.after([change], step=self.step)

    def save(self) -> Callable[[], None]:
        """Remember weights, buffers, optimizer state and table; returns what restores them."""
        table, used = self.living.table, self.living.loads.used
        with torch.no_grad():
            held = [(value, value.clone()) for value in self.training.trainable.module.state_dict().values()]
            states = [
                (state, {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()})
                for optimizer in self.training.optimizers
                for state in optimizer.state.values()
            ]

        @torch.no_grad()
        def restore() -> None:
            for value, before in held:
                value.copy_(before)
            for state, before in states:
                for name, value in before.items():
                    if isinstance(value, Tensor) and isinstance(state.get(name), Tensor):
                        state[name].copy_(value)
                    else:
                        state[name] = value
            self.living.table, self.living.loads.used = table, used

        return restore

    def losses(self, batch: Batch) -> Tensor:
        """The loss of each row in evaluation, (B,), on the host."""
        found = []
        with torch.no_grad(), in_eval(self.training.trainable.module):
            for part in batches(batch, 256):
                found.append(row_losses(answer_of(self.training, part).logits, part["labels"]).cpu())
        return torch.cat(found)

    def loss(self, batch: Batch) -> float:
        """The mean of `losses`."""
        return float(self.losses(batch).double().mean())

    def replay(self, batch: Batch, teacher: Tensor | None, *, lr: float, size: int) -> int:
        """Train on these rows once, in batches of `size`, towards their labels or the teacher's logits. The run's
        optimizers take the steps, at another learning rate. Returns their number."""
        number, training = 0, self.training
        peak = max(group["lr"] for optimizer in training.optimizers for group in optimizer.param_groups) or 1.0
        for start in range(0, rows(batch), size):
            part = {name: value[start : start + size] for name, value in batch.items()}
            goal = None if teacher is None else teacher[start : start + size].to(training.device)
            if goal is None:
                training.backward([MicroBatch(part, 1, last=True)], global_weight=1)
            else:
                self._backward_to(part, goal)
            self._optimizer_step(lr / peak)
            number += 1
        for router in self.routers:
            router.pending_counts.zero_()
        return number

    def _backward_to(self, part: Batch, goal: Tensor) -> None:
        """Backward of the divergence from the teacher's answer, in place of the labels' loss."""
        training = self.training
        training.gradients.zero_()
        answer = answer_of(training, part)
        loss = _divergence(answer.logits.float(), goal, part["labels"])
        total = loss if answer.aux is None else loss + answer.aux
        training.gradients.attach()
        training.scale.scale(total).backward()
        training.gradients.take()

    @torch.no_grad()
    def _optimizer_step(self, factor: float) -> None:
        training = self.training
        if training.scale.enabled:
            training.gradients.scale_(training.scale.inverse)
        norm = training.reduction.sum_of_squares().sqrt()
        if training.max_grad_norm:
            training.gradients.scale_((training.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        if not bool(torch.isfinite(norm)):
            return
        for optimizer in training.optimizers:
            if hasattr(optimizer, "found_inf"):
                optimizer.found_inf = torch.zeros((), device=training.device)  # pyright: ignore[reportAttributeAccessIssue]
            before = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
            optimizer.step()
            for group, lr in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = lr

    @torch.no_grad()
    def view(self, batch: Batch) -> list[LayerView]:
        """Run as many of the rows in evaluation as it takes to see `MEASURED_TOKENS`, and look at each layer."""
        tokens = max(1, batch["labels"].numel() // rows(batch))
        batch = next(batches(batch, max(16, MEASURED_TOKENS // tokens)))
        seen: list[tuple[Tensor, Tensor] | None] = [None] * len(self.routers)
        module = self.training.trainable.module
        with ExitStack() as stack:
            for number, router in enumerate(self.routers):

                def look(router: nn.Module, args: Any, routing: Routing, number: int = number) -> None:
                    seen[number] = (args[0].detach(), routing.indices_TK)

                stack.callback(router.register_forward_hook(look).remove)
            stack.enter_context(in_eval(module))
            answer_of(self.training, batch)
        return [self._layer_view(router, *one) for router, one in zip(self.routers, seen, strict=True) if one]

    def _layer_view(self, router: TopKRouter, x_BSD: Tensor, chosen_TK: Tensor) -> LayerView:
        tokens = x_BSD.shape[0] * x_BSD.shape[1]
        picked = torch.arange(0, tokens, max(1, -(-tokens // MEASURED_TOKENS)), device=x_BSD.device)
        x_TD = x_BSD.reshape(tokens, -1)[picked]
        scores = router.scores(x_TD.unsqueeze(1)).squeeze(1)
        row_T = (picked // x_BSD.shape[1]).cpu()
        return LayerView(x_TD.float(), scores.double().cpu(), chosen_TK[picked].cpu(), row_T)

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
    """The rows in pieces of at most `size`."""
    for start in range(0, rows(batch), size):
        yield {name: value[start : start + size] for name, value in batch.items()}
