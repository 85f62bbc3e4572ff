"""Bench `continual`: tasks one after another, and how much of the earlier ones is left at the end.

A mixture whose experts come and go and which replays in its sleep, against plain fine-tuning, elastic weight
consolidation, plain replay from as many bytes, and a fixed mixture with as many experts as the first ends with.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cluster.config import Count, NonNegative, Positive
from experts.lifecycle.replay import Reservoir
from jobs.bench.harness.measuring import BenchMeasurement, Check, median_interval
from jobs.bench.harness.options import BenchOptions, key
from jobs.bench.harness.sessions import SessionArm, job_of
from raytrain.errors import InputError
from raytrain.train.session import Session
from raytrain.trainable import Batch, LossOutput, in_eval

Suite = Literal["permuted", "split", "rotating"]
ARMS = ("lifecycle", "plain", "ewc", "replay", "fixed")
CLASSES, SIDE, BATCH = 10, 12, 32
FISHER_ROWS = 200
START, MOST = 4, 8
"""Experts of each layer at the start, and at most."""
MODEL = {"builder": "experts.models:moe_mlp", "width": 64, "layers": 2, "num_classes": CLASSES}


class ContinualOptions(BenchOptions):
    blocks: Count = key(3, "seeds; each trains every arm on the same tasks", quick=1)
    threads: Count | Literal["auto"] = key(1, "threads of one process; products this small gain none")
    suites: list[Suite] = key(["permuted", "split", "rotating"], "kinds of tasks")
    tasks: Count = key(3, "of each suite; split needs at least as many pairs of classes", quick=2)
    steps: Count = key(80, "of training on each task, 32 rows each", quick=12)
    rows: Count = key(800, "of each task, for training", quick=100)
    test_rows: Count = key(500, "of each task, for its accuracy", quick=50)
    memory: Count = key(400_000, "bytes of rows kept for replay, the same for both arms that replay")
    sleep_every: Count = key(10, "steps between two sleep cycles")
    sleep_rows: Count = key(256, "rows that a cycle replays")
    ewc: NonNegative = key(1000.0, "weight of EWC's penalty")
    lr: Positive = key(0.002, "learning rate of every arm, and of the replay")


def scores(matrix: Sequence[Sequence[float]], untrained: Sequence[float]) -> dict[str, float]:
    """What a learner kept of its tasks, as means over them; `matrix[i][j]` is the accuracy on task j after task i was
    trained.

    Example:
        >>> from jobs.bench.continual import scores
        >>> scores([[0.9, 0.2], [0.6, 0.8]], [0.1, 0.1])["forgetting"]
        0.3
    """
    last, tasks = matrix[-1], len(matrix)
    earlier = range(tasks - 1)
    found = {
        "accuracy": last,  # after the last task
        "forgetting": [max(row[j] for row in matrix) - last[j] for j in earlier],  # from the best accuracy so far
        "forward": [matrix[j - 1][j] - untrained[j] for j in range(1, tasks)],  # just before a task is trained
        "retention": [last[j] / matrix[j][j] for j in earlier if matrix[j][j]],  # over that just after the task
    }
    return {name: round(sum(values) / len(values), 12) if values else 0.0 for name, values in found.items()}


def run(options: ContinualOptions, found: BenchMeasurement) -> None:
    """Train every arm on every suite with each seed; see `ContinualOptions`."""
    found.block = "the accuracy after the last task"
    found.unit = ""
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for suite in options.suites:
        results[suite] = {arm: [] for arm in ARMS}
        for number in range(options.blocks):
            seed = options.seed + number
            tasks = tasks_of(suite, draw_images(seed), options, seed=seed)
            experts = None
            for arm in ARMS:
                began = time.perf_counter()
                learnt = learn_tasks(arm, tasks, options, seed=seed, experts=experts)
                experts = learnt["experts"] if arm == "lifecycle" else experts
                own = scores(learnt["matrix"], learnt["untrained"])
                results[suite][arm].append({**learnt, **own, "seconds": time.perf_counter() - began})
                shown = f"accuracy {own['accuracy']:.3f}, forgetting {own['forgetting']:.3f}"
                found.say(f"{suite} seed {seed} {arm}: {shown}")
        _judge(found, suite, results[suite])
    same_size = ("plain", "ewc", "replay")
    starts = [[row["untrained"] for row in results[options.suites[0]][arm]] for arm in same_size]
    alike = starts == [starts[0]] * len(starts)
    found.gate(Check("arms of the same size start from the same weights", alike, f"{len(starts)} arms"))
    most = max(row["kept_bytes"] for one in results.values() for arm in ("lifecycle", "replay") for row in one[arm])
    found.gate(Check("no arm keeps more rows than the bytes allow", most <= options.memory, f"{most} bytes"))
    found.values["results"] = results
    found.advice = table_lines(results)


def _judge(found: BenchMeasurement, suite: str, results: Mapping[str, list[dict[str, Any]]]) -> None:
    """Add the arms' values, and the two goals of the lifecycle with replay."""
    for arm, rows in results.items():
        found.arms[f"{suite} {arm}"] = [row["accuracy"] for row in rows]
    own, plain = ([row["forgetting"] for row in results[arm]] for arm in ("lifecycle", "plain"))
    found.claim(
        f"{suite}: half of plain fine-tuning's forgetting",
        statistics.median(a - 0.5 * b for a, b in zip(own, plain, strict=True)) <= 0,
        f"{median_interval(own):.3f} against {median_interval(plain):.3f}",
    )
    accuracy = {arm: [row["accuracy"] for row in rows] for arm, rows in results.items()}
    label = f"{suite}: accuracy with lifecycle / plain replay"
    ratio = found.compare(accuracy, of="lifecycle", to="replay", name=label, words=("smaller", "larger"))
    effect = f"{suite}: at least level with plain replay of the same bytes"
    found.claim(effect, ratio.high >= 1.0, f"ratio of accuracies {ratio:.3f}")


def table_lines(results: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> list[str]:
    """A row for each suite and arm: medians with their intervals over the seeds."""
    names = ("accuracy", "forgetting", "forward", "retention")
    lines = [f"{'suite':9} {'arm':10} " + " ".join(f"{name:>22}" for name in names) + f" {'experts':>8} {'s':>6}"]
    for suite, arms in results.items():
        for arm, rows in arms.items():
            cells = " ".join(f"{f'{median_interval([row[name] for row in rows]):.3f}':>22}" for name in names)
            experts = sum(sum(row["experts"]) / len(row["experts"]) for row in rows) / len(rows)
            seconds = sum(row["seconds"] for row in rows) / len(rows)
            lines.append(f"{suite:9} {arm:10} {cells} {experts:8.1f} {seconds:6.1f}")
    return lines


# ---------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Task:
    """Rows to train on and to test with."""

    train: Batch
    test: Batch


def draw_images(seed: int, *, rows: int = 6000) -> Batch:
    """Ten classes of images, "x" (N, side, side) from 0 to 1 with their "labels" (N,): each is a smooth drawn pattern,
    shifted by up to a pixel, with noise."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.rand(CLASSES, 1, 4, 4, generator=draw)
    patterns = F.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic", align_corners=False).squeeze(1)
    labels = torch.randint(CLASSES, (rows,), generator=draw)
    shifts = torch.randint(-1, 2, (rows, 2), generator=draw).tolist()
    shifted = torch.stack(
        [patterns[label].roll(tuple(shift), (0, 1)) for label, shift in zip(labels.tolist(), shifts, strict=True)]
    )
    noise = torch.randn(rows, SIDE, SIDE, generator=draw)
    return {"x": (shifted + 0.35 * noise).clamp(0, 1), "labels": labels}


def tasks_of(suite: Suite, images: Batch, options: ContinualOptions, *, seed: int) -> list[Task]:
    """The tasks of a suite. permuted: the pixels of each task in an order of its own, the first in theirs. split: two
    classes a task. rotating: each task is turned further, up to a half turn in all."""
    draw = torch.Generator().manual_seed(1000 + seed)
    number, held = options.tasks, options.test_rows
    if suite == "split" and 2 * number > CLASSES:
        raise InputError("tasks", got=str(number), expected="at most a task for each two classes, with suites split")
    found = []
    for task in range(number):
        x, labels = images["x"], images["labels"]
        if suite == "split":
            mine = (labels == 2 * task) | (labels == 2 * task + 1)
            x, labels = x[mine], labels[mine]
        order = torch.randperm(len(x), generator=draw)[: options.rows + held]
        if len(order) <= held:
            raise InputError("test_rows", got=str(held), expected=f"fewer than the {len(x)} rows of a task")
        x, labels = x[order], labels[order]
        if suite == "rotating":
            angle = math.pi * task / max(1, number - 1)
            turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
            grid = F.affine_grid(turn.expand(len(x), 2, 3), [len(x), 1, *x.shape[1:]], align_corners=False)
            x = F.grid_sample(x.unsqueeze(1), grid, align_corners=False).squeeze(1)
        flat = x.flatten(1)
        if suite == "permuted" and task:
            flat = flat[:, torch.randperm(flat.shape[1], generator=draw)]
        found.append(Task({"x": flat[held:], "labels": labels[held:]}, {"x": flat[:held], "labels": labels[:held]}))
    return found


# ---------------------------------------------------------------- losses


Loss = Callable[..., LossOutput]
Kept = list[tuple[dict[str, Tensor], dict[str, Tensor]]]
"""Of each task the weights and their Fisher information, by name."""


def ewc_penalty(parameters: Mapping[str, Tensor], kept: Kept, weight: float) -> Tensor:
    """weight / 2 x the sum over tasks and parameters of fisher x (parameter - anchor)^2 (Kirkpatrick et al., 2017)."""
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


def with_ewc(loss: Loss, kept: Kept, weight: float) -> Loss:
    """A loss with EWC's penalty for the tasks so far."""

    def penalised(module: nn.Module, batch: Batch) -> LossOutput:
        plain = loss(module, batch)
        if not kept or not module.training:
            return plain
        return replace(plain, loss=plain.loss + ewc_penalty(dict(module.named_parameters()), kept, weight))

    return penalised


class ReplayLoss:
    """A loss that is half of the step's rows and half of as many kept rows."""

    def __init__(self, limit: int, seed: int) -> None:
        self.kept, self.step = Reservoir(limit, seed), 0

    def wrap(self, loss: Loss) -> Loss:
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
    """Train an arm on the tasks in turn; `experts` of each layer are those of the fixed mixture."""
    sections = sections_of(arm, options, experts=max(experts or [START]))
    importance: Kept = []
    replay = ReplayLoss(options.memory, seed)
    matrix, untrained = list[list[float]](), list[float]()
    cycles: list[dict[str, Any]] = []
    session: Session | None = None
    for number, task in enumerate(tasks):
        before, learner = session, SessionArm({**job_of(options, MODEL, task.train, **sections), "seed": seed})
        session = learner.session
        if before is None:
            untrained = [accuracy(session, other.test) for other in tasks]
        else:
            take_over(session, before.parts())
            before.close()
        session.state.step = number * options.steps
        plain = session.trainable.loss
        if arm == "ewc":
            session.trainable.loss = with_ewc(plain, importance, options.ewc)
        elif arm == "replay":
            session.trainable.loss = replay.wrap(plain)
        learner.run(options.steps)
        cycles += [fields for kind, fields in learner.log.events if kind == "sleep_cycle"]
        session.trainable.loss = plain
        if arm == "ewc":
            weights = {name: value.detach().clone() for name, value in session.trainable.module.named_parameters()}
            importance.append((weights, fisher_information(session, task.train, seed=seed)))
        matrix.append([accuracy(session, other.test) for other in tasks])
    assert session is not None
    session.close()
    living = cycles[-1]["living_after"] if cycles else [sections["experts"]["num_experts"]] * 2
    kept = replay.kept.bytes if arm == "replay" else max((cycle["kept_bytes"] for cycle in cycles), default=0)
    return {
        "matrix": matrix, "untrained": untrained, "experts": living, "kept_bytes": kept,
        "replayed": BATCH * replay.step if arm == "replay" else sum(cycle["rows"] for cycle in cycles),
        "sleep_s": sum(cycle["seconds"] for cycle in cycles),
    }  # fmt: skip


def sections_of(arm: str, options: ContinualOptions, *, experts: int) -> dict[str, Any]:
    """The sections of an arm's job, without model and data; `experts` are those of the fixed mixture."""
    number = experts if arm == "fixed" else START
    section: dict[str, Any] = {"num_experts": number, "top_k": 2, "hidden": 48, "hosts": 0}
    if arm == "lifecycle":
        section["lifecycle"] = {
            "max_experts": MOST, "every": options.sleep_every, "birth": {"cooldown_steps": options.sleep_every},
            "replay": {"bytes": options.memory, "every": options.sleep_every, "rows": options.sleep_rows,
                       "batch_size": BATCH, "lr": options.lr, "priority": "uniform"},
        }  # fmt: skip
    return {
        "name": f"continual-{arm}", "threads": options.thread_count, "experts": section,
        "optim": {"lr": options.lr, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
        "precision": {"dtype": "fp32"},
        "loop": {"global_batch_size": BATCH, "max_steps": options.tasks * options.steps, "log_every": options.steps},
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
    module = session.trainable.module
    with in_eval(module):
        outputs, _ = module(rows["x"])
    return float((outputs.argmax(-1) == rows["labels"]).double().mean())
