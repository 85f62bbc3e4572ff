"""Arms of bench `continual`: tasks as tensors, and learners that train on them one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experts.lifecycle.replay import Reservoir
from jobs.bench.harness.sessions import RunLog
from jobs.driver.local_session import session_of
from raytrain.data.sources.idx import IMAGES, LABELS, read_idx
from raytrain.errors import InputError
from raytrain.train.session import Session
from raytrain.trainable import Batch, LossOutput, in_eval

if TYPE_CHECKING:
    from jobs.bench.continual import ContinualOptions, Suite

CLASSES, SIDE, BATCH = 10, 12, 32
FISHER_ROWS = 200
START, MOST = 4, 8
"""Experts of each layer at the start, and at most."""


@dataclass(frozen=True)
class Images:
    """x (N, side, side) from 0 to 1, labels (N,)."""

    x: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Task:
    """Rows to train on and to test with."""

    train: dict[str, Tensor]
    test: dict[str, Tensor]


# ---------------------------------------------------------------- tasks


def draw_images(seed: int, *, rows: int = 6000) -> Images:
    """Ten classes of images: each is a smooth drawn pattern, shifted by up to a pixel, with noise."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.rand(CLASSES, 1, 4, 4, generator=draw)
    patterns = F.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic", align_corners=False).squeeze(1)
    labels = torch.randint(CLASSES, (rows,), generator=draw)
    shifts = torch.randint(-1, 2, (rows, 2), generator=draw).tolist()
    shifted = torch.stack(
        [patterns[label].roll(tuple(shift), (0, 1)) for label, shift in zip(labels.tolist(), shifts, strict=True)]
    )
    return Images((shifted + 0.35 * torch.randn(rows, SIDE, SIDE, generator=draw)).clamp(0, 1), labels)


def read_images(images: str, labels: str) -> Images:
    """Images of an IDX file as averages of 2 x 2 pixels.

    Raises:
        InputError: files that are not there, or do not fit each other.
    """
    pixels, classes = read_idx(images, key="images", **IMAGES), read_idx(labels, key="labels", **LABELS)
    if pixels.ndim != 3 or len(pixels) != len(classes):
        raise InputError(
            "images", got=f"shape {pixels.shape} with {len(classes)} labels", expected="as many (N, side, side) images"
        )
    x = torch.from_numpy(np.ascontiguousarray(pixels)).float().div(255).unsqueeze(1)
    return Images(F.avg_pool2d(x, 2).squeeze(1), torch.from_numpy(classes.astype(np.int64)))


def tasks_of(suite: Suite, images: Images, options: ContinualOptions, *, seed: int) -> list[Task]:
    """The tasks of a suite. permuted: the pixels of each task in an order of its own, the first in theirs. split: two
    classes a task. rotating: each task is turned further, up to a half turn in all.

    Raises:
        InputError: more split tasks than pairs of classes, or too few images.
    """
    draw = torch.Generator().manual_seed(1000 + seed)
    number, pixels = options.tasks, images.x[0].numel()
    if suite == "split" and 2 * number > int(images.labels.max()) + 1:
        raise InputError("tasks", got=str(number), expected="at most a task for each two classes, with suites split")
    found = []
    for task in range(number):
        x, labels = images.x, images.labels
        if suite == "split":
            mine = (labels == 2 * task) | (labels == 2 * task + 1)
            x, labels = x[mine], labels[mine]
        order = torch.randperm(len(x), generator=draw)[: options.rows + options.test_rows]
        if len(order) <= options.test_rows:
            raise InputError(
                "test_rows", got=str(options.test_rows), expected=f"fewer than the {len(x)} rows of a task"
            )
        x, labels = x[order], labels[order]
        if suite == "rotating":
            x = _turned(x, math.pi * task / max(1, number - 1))
        flat = x.flatten(1)
        if suite == "permuted" and task:
            flat = flat[:, torch.randperm(pixels, generator=draw)]
        held = options.test_rows
        found.append(Task({"x": flat[held:], "labels": labels[held:]}, {"x": flat[:held], "labels": labels[:held]}))
    return found


def _turned(x_NSS: Tensor, angle: float) -> Tensor:
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = F.affine_grid(turn.expand(len(x_NSS), 2, 3), [len(x_NSS), 1, *x_NSS.shape[1:]], align_corners=False)
    return F.grid_sample(x_NSS.unsqueeze(1), grid, align_corners=False).squeeze(1)


# ---------------------------------------------------------------- losses


def ewc_penalty(parameters: Mapping[str, Tensor], kept: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]],
                weight: float) -> Tensor:  # fmt: skip
    """weight / 2 x the sum over tasks and parameters of fisher x (parameter - anchor)^2 (Kirkpatrick et al., 2017).

    Args:
        kept: (anchors, Fisher information) of each task, by name.
    """
    total = torch.zeros(())
    for anchors, fisher in kept:
        for name, parameter in parameters.items():
            total = total + (fisher[name] * (parameter - anchors[name]).square()).sum()
    return 0.5 * weight * total


def fisher_information(session: Session, rows: Batch, *, seed: int) -> dict[str, Tensor]:
    """The diagonal of the empirical Fisher information: the mean over rows of each gradient's square."""
    module, loss = session.trainable.module, session.trainable.loss
    named = dict(module.named_parameters())
    found = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    draw = torch.Generator().manual_seed(seed)
    picked = torch.randperm(len(rows["labels"]), generator=draw)[:FISHER_ROWS]
    with in_eval(module):
        for row in picked.tolist():
            one = loss(module, {name: value[row : row + 1] for name, value in rows.items()}).loss
            gradients = torch.autograd.grad(one, list(named.values()), allow_unused=True)
            for name, gradient in zip(named, gradients, strict=True):
                if gradient is not None:
                    found[name] += gradient.square() / len(picked)
    return found


class EwcLoss:
    """A loss with EWC's penalty for the tasks so far."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.kept: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def wrap(self, loss: Callable[..., LossOutput]) -> Callable[..., LossOutput]:
        """Add the penalty."""

        def penalised(module: nn.Module, batch: Batch) -> LossOutput:
            plain = loss(module, batch)
            if not self.kept or not module.training:
                return plain
            return replace(
                plain, loss=plain.loss + ewc_penalty(dict(module.named_parameters()), self.kept, self.weight)
            )

        return penalised

    def end_task(self, session: Session, rows: Batch, *, seed: int) -> None:
        """Keep the weights and their importance for this task."""
        anchors = {name: value.detach().clone() for name, value in session.trainable.module.named_parameters()}
        self.kept.append((anchors, fisher_information(session, rows, seed=seed)))


class ReplayLoss:
    """A loss that is half of the step's rows and half of as many kept rows."""

    def __init__(self, limit: int, seed: int) -> None:
        self.kept, self.step = Reservoir(limit, seed), 0

    def wrap(self, loss: Callable[..., LossOutput]) -> Callable[..., LossOutput]:
        """Add the replay."""

        def replayed(module: nn.Module, batch: Batch) -> LossOutput:
            plain = loss(module, batch)
            if not module.training:
                return plain
            self.step += 1
            if len(self.kept):
                drawn = self.kept.rows(self.kept.draw(len(batch["labels"]), seed=self.step, priority=False))
                old = loss(module, drawn)
                aux = None if plain.aux is None or old.aux is None else 0.5 * (plain.aux + old.aux)
                plain = replace(plain, loss=0.5 * (plain.loss + old.loss), aux=aux)
            self.kept.add(batch, uncertainty=torch.ones(len(batch["labels"])), step=self.step)
            return plain

        return replayed


# ---------------------------------------------------------------- learners


def learn_tasks(
    arm: str, tasks: Sequence[Task], options: ContinualOptions, *, seed: int, experts: list[int] | None
) -> dict[str, Any]:
    """Train an arm on the tasks in turn: {"matrix", "untrained" accuracies, "experts" of each layer at the end,
    "parameters", "kept_bytes", "replayed" rows}.

    Args:
        experts: of each layer, for the fixed mixture.
    """
    job = job_of(arm, options, seed=seed, experts=max(experts or [START]), features=tasks[0].train["x"].shape[1])
    ewc, replay = EwcLoss(options.ewc), ReplayLoss(options.memory, seed)
    parts: dict[str, Any] | None = None
    matrix, untrained, session = [], [], None
    cycles: list[dict[str, Any]] = []
    for number, task in enumerate(tasks):
        session = session_of({**job, "data": {"train": task.train, "eval_fraction": 0.0}})
        session.prepare("fp32")
        if parts is None:
            untrained = [accuracy(session, other.test) for other in tasks]
        else:
            take_over(session, parts)
        session.state.step = number * options.steps
        plain = session.trainable.loss
        if arm == "ewc":
            session.trainable.loss = ewc.wrap(plain)
        if arm == "replay":
            session.trainable.loss = replay.wrap(plain)
        log = RunLog()
        loop = session.loop(reporter=log, should_stop=lambda: False)
        loop.limits = replace(loop.limits, max_steps=session.state.step + options.steps)
        loop.run(session.state)
        cycles += [fields for kind, fields in log.events if kind == "sleep_cycle"]
        session.trainable.loss = plain
        if arm == "ewc":
            ewc.end_task(session, task.train, seed=seed)
        matrix.append([accuracy(session, other.test) for other in tasks])
        parts = session.parts()
        session.close()
    assert session is not None
    living = cycles[-1]["living_after"] if cycles else [job["experts"]["num_experts"]] * 2
    kept = replay.kept.bytes if arm == "replay" else max((cycle["kept_bytes"] for cycle in cycles), default=0)
    return {
        "matrix": matrix, "untrained": untrained, "experts": living, "kept_bytes": kept,
        "parameters": sum(value.numel() for value in session.trainable.module.parameters()),
        "replayed": BATCH * replay.step if arm == "replay" else sum(cycle["rows"] for cycle in cycles),
        "births": sum(cycle["born"] for cycle in cycles), "merges": sum(cycle["merged"] for cycle in cycles),
        "sleep_s": sum(cycle["seconds"] for cycle in cycles), "drift": [cycle["drift"] for cycle in cycles],
    }  # fmt: skip


def job_of(arm: str, options: ContinualOptions, *, seed: int, experts: int, features: int) -> dict[str, Any]:
    """The job of an arm, without data."""
    section: dict[str, Any] = {
        "num_experts": experts if arm == "fixed" else START,
        "top_k": 2,
        "hidden": 48,
        "hosts": 0,
    }
    if arm == "lifecycle":
        section["graph_routing"] = options.graph_routing
        section["lifecycle"] = {
            "max_experts": MOST, "every": options.sleep_every, "birth": {"cooldown_steps": options.sleep_every},
            "replay": {"bytes": options.memory, "every": options.sleep_every, "rows": options.sleep_rows,
                       "batch_size": BATCH, "lr": options.lr, "priority": "uniform"},
        }  # fmt: skip
    return {
        "name": f"continual-{arm}", "seed": seed,
        "model": {"builder": "experts.models:moe_mlp", "width": 64, "layers": 2, "num_features": features,
                  "num_classes": CLASSES},
        "experts": section,
        "optim": {"lr": options.lr, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
        "precision": {"dtype": "fp32"},
        "scale": {"workers": 1, "mode": "cpu", "threads": options.thread_count},
        "loop": {"global_batch_size": BATCH, "max_steps": options.tasks * options.steps, "log_every": options.steps,
                 },
    }  # fmt: skip


def take_over(session: Session, parts: Mapping[str, Any]) -> None:
    """Continue from the state of the task before: weights, optimizer, experts and reservoir."""
    session.trainable.module.load_state_dict(parts["model"])
    for index, optimizer in enumerate(session.optimizers):
        optimizer.load_state_dict(parts["optimizer"][str(index)])
    assert session.trainable.state_parts is not None
    for name, part in session.trainable.state_parts().items():
        part.load_state_dict(parts[f"part_{name}"])


@torch.no_grad()
def accuracy(session: Session, rows: Batch) -> float:
    """The share of rows whose class the model finds."""
    module = session.trainable.module
    with in_eval(module):
        outputs, _ = module(rows["x"])
    return float((outputs.argmax(-1) == rows["labels"]).double().mean())
