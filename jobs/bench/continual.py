"""Bench `continual`: tasks one after another, and how much of the earlier ones is left at the end.

A mixture whose experts come and go and which replays in its sleep, against plain fine-tuning, elastic weight
consolidation, plain replay from as many bytes, and a fixed mixture with as many experts as the first ends with.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from cluster.config import Count, NonNegative, Positive, Text
from jobs.bench.continual_arms import draw_images, learn_tasks, read_images, tasks_of
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, median_interval
from jobs.bench.harness.options import BenchOptions
from raytrain.errors import InputError

Suite = Literal["permuted", "split", "rotating"]
ARMS = ("lifecycle", "plain", "ewc", "replay", "fixed")


class ContinualOptions(BenchOptions):
    """Options of bench `continual`.

    Images are drawn from the seed, or read from IDX files (images=FILE labels=FILE, such as MNIST's).
    """

    QUICK: ClassVar[dict[str, Any]] = {"tasks": 2, "steps": 12, "rows": 100, "test_rows": 50, "blocks": 1}

    blocks: Count = Field(3, description="seeds; each trains every arm on the same tasks")
    threads: Count | Literal["auto"] = Field(1, description="threads of one process; products this small gain none")
    suites: list[Suite] = Field(["permuted", "split", "rotating"], description="kinds of tasks")
    tasks: Count = Field(3, description="of each suite; split needs at least as many pairs of classes")
    steps: Count = Field(80, description="of training on each task, 32 rows each")
    rows: Count = Field(800, description="of each task, for training")
    test_rows: Count = Field(500, description="of each task, for its accuracy")
    images: Text | None = Field(None, description="an IDX file of images; null draws them")
    labels: Text | None = Field(None, description="the IDX file of their labels")
    memory: Count = Field(400_000, description="bytes of rows kept for replay, the same for both arms that replay")
    sleep_every: Count = Field(10, description="steps between two sleep cycles")
    sleep_rows: Count = Field(256, description="rows that a cycle replays")
    graph_routing: NonNegative = Field(0.0, description="experts.graph_routing of the arm with a lifecycle")
    ewc: NonNegative = Field(1000.0, description="weight of EWC's penalty")
    lr: Positive = Field(0.002, description="learning rate of every arm, and of the replay")


@dataclass(frozen=True)
class Scores:
    """What a learner kept of its tasks.

    Attributes:
        accuracy: mean over all tasks after the last one.
        forgetting: mean over all tasks but the last of the best accuracy so far minus that after the last task.
        forward: mean over all tasks but the first of the accuracy just before it is trained, minus that of an
            untrained model.
        retention: mean over all tasks but the last of the accuracy at the end over that just after the task.
    """

    accuracy: float
    forgetting: float
    forward: float
    retention: float


def scores(matrix: Sequence[Sequence[float]], untrained: Sequence[float]) -> Scores:
    """The scores from accuracies; `matrix[i][j]` is that on task j after task i was trained.

    Example:
        >>> from jobs.bench.continual import scores
        >>> scores([[0.9, 0.2], [0.6, 0.8]], [0.1, 0.1]).forgetting
        0.3
    """
    last, tasks = matrix[-1], len(matrix)
    earlier = range(tasks - 1)
    forgetting = [max(row[j] for row in matrix) - last[j] for j in earlier]
    forward = [matrix[j - 1][j] - untrained[j] for j in range(1, tasks)]
    retention = [last[j] / matrix[j][j] for j in earlier if matrix[j][j]]

    def mean(values: Sequence[float]) -> float:
        return round(sum(values) / len(values), 12) if values else 0.0

    return Scores(mean(last), mean(forgetting), mean(forward), mean(retention))


def run(options: ContinualOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Train every arm on every suite with each seed; see `ContinualOptions`.

    Raises:
        InputError: files that are missing or do not fit, or more split tasks than pairs of classes.
    """
    if (options.images is None) != (options.labels is None):
        raise InputError("images", got="one of images and labels", expected="both, or neither")
    found = BenchMeasurement("continual", quick, options.model_dump(), "the accuracy after the last task", unit="")
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for suite in options.suites:
        results[suite] = {arm: [] for arm in ARMS}
        for number in range(options.blocks):
            seed = options.seed + number
            drawn = draw_images(seed) if options.images is None else read_images(options.images, str(options.labels))
            tasks = tasks_of(suite, drawn, options, seed=seed)
            experts = None
            for arm in ARMS:
                began = time.perf_counter()
                learnt = learn_tasks(arm, tasks, options, seed=seed, experts=experts)
                experts = learnt["experts"] if arm == "lifecycle" else experts
                own = scores(learnt["matrix"], learnt["untrained"])
                row = {**learnt, **vars(own), "seconds": time.perf_counter() - began}
                results[suite][arm].append(row)
                say(f"{suite} seed {seed} {arm}: accuracy {own.accuracy:.3f}, forgetting {own.forgetting:.3f}")
        _judge(found, suite, results[suite])
    ids = {arm: [row["untrained"] for row in results[options.suites[0]][arm]] for arm in ARMS if arm != "fixed"}
    alike = all(one == ids["plain"] for arm, one in ids.items() if arm != "lifecycle")
    found.gate(Check("arms of the same size start from the same weights", alike, f"{len(ids) - 1} arms"))
    bytes_of = [row["kept_bytes"] for one in results.values() for arm in ("lifecycle", "replay") for row in one[arm]]
    found.gate(
        Check("no arm keeps more rows than the bytes allow", max(bytes_of) <= options.memory, f"{max(bytes_of)} bytes")
    )
    found.values["results"] = results
    found.advice = table_lines(results)
    found.picture = picture(results)
    return found


def _judge(found: BenchMeasurement, suite: str, results: Mapping[str, list[dict[str, Any]]]) -> None:
    """Add the arms' values, and the two goals of the lifecycle with replay."""
    for arm, rows in results.items():
        found.arms[f"{suite} {arm}"] = [row["accuracy"] for row in rows]
    forgotten = {arm: median_interval([row["forgetting"] for row in rows]) for arm, rows in results.items()}
    half = [
        own["forgetting"] - 0.5 * plain["forgetting"]
        for own, plain in zip(results["lifecycle"], results["plain"], strict=True)
    ]
    found.claim(
        f"{suite}: half of plain fine-tuning's forgetting", median_interval(half).median <= 0,
        f"{forgotten['lifecycle']:.3f} against {forgotten['plain']:.3f}",
    )  # fmt: skip
    accuracy = {arm: [row["accuracy"] for row in rows] for arm, rows in results.items()}
    ratio = found.compare(
        accuracy, of="lifecycle", to="replay", name=f"{suite}: accuracy with lifecycle / plain replay",
        goal=Goal(at_least=1.0), words=("smaller", "larger"),
    )  # fmt: skip
    found.claim(
        f"{suite}: at least level with plain replay of the same bytes", ratio.median >= 1.0 or ratio.high >= 1.0,
        f"ratio of accuracies {ratio:.3f}",
    )  # fmt: skip


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


def picture(results: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """The plot: a panel for each suite, the mean accuracy on the tasks so far after each task."""
    panels = []
    for suite, arms in results.items():
        series = []
        for number, (arm, rows) in enumerate(arms.items()):
            curves = [[sum(line[: i + 1]) / (i + 1) for i, line in enumerate(row["matrix"])] for row in rows]
            means = [sum(column) / len(column) for column in zip(*curves, strict=True)]
            series.append({"label": arm, "hue": number, "x": list(range(1, len(means) + 1)), "y": means})
        panels.append(
            {"title": suite, "x_label": "tasks trained", "y_label": "mean accuracy on them", "kind": "line",
             "series": series}
        )  # fmt: skip
    return {"title": "continual learning: what is left of the tasks so far", "panels": panels}
