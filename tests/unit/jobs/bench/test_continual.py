"""Bench continual: its scores and EWC's penalty by hand, its tasks, and a small run of every arm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from jobs.bench.continual import (
    ARMS,
    BATCH,
    ContinualOptions,
    ReplayLoss,
    draw_images,
    ewc_penalty,
    fisher_information,
    learn_tasks,
    scores,
    tasks_of,
    with_ewc,
)
from jobs.bench.harness.options import bench_verb
from raytrain.errors import InputError
from raytrain.trainable import LossOutput


@pytest.mark.covers("TEST-07")
def test_scores_are_those_counted_by_hand() -> None:
    found = scores([[0.8, 0.3, 0.2], [0.9, 0.7, 0.4], [0.6, 0.35, 1.0]], [0.1, 0.2, 0.1])
    assert found["accuracy"] == pytest.approx(1.95 / 3)
    assert found["forgetting"] == pytest.approx((0.3 + 0.35) / 2), "from the best accuracy, that of task 0 after task 1"
    assert found["forward"] == pytest.approx((0.1 + 0.3) / 2)
    assert found["retention"] == pytest.approx((0.75 + 0.5) / 2)


@pytest.mark.covers("TEST-07")
@pytest.mark.parametrize("tasks", [1, 3])
def test_ewcs_penalty_and_its_gradient_are_the_closed_form(tasks: int) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 2), "b": (4,)}

    def tensors() -> dict[str, Tensor]:
        return {name: torch.rand(shape, generator=draw) for name, shape in shapes.items()}

    parameters = {name: value.requires_grad_() for name, value in tensors().items()}
    kept = [(tensors(), tensors()) for _ in range(tasks)]
    found = ewc_penalty(parameters, kept, 7.0)
    expected = sum(
        3.5 * float((fisher[name] * (parameters[name] - anchors[name]) ** 2).sum().detach())
        for anchors, fisher in kept
        for name in shapes
    )
    assert float(found.detach()) == pytest.approx(expected, rel=1e-5)
    found.backward()
    for name, parameter in parameters.items():
        gradient = sum(7.0 * fisher[name] * (parameter.detach() - anchors[name]) for anchors, fisher in kept)
        assert torch.allclose(parameter.grad, gradient)  # type: ignore[arg-type]


def test_a_loss_with_ewc_has_the_penalty_in_training_alone() -> None:
    module, batch = torch.nn.Linear(2, 1, bias=False), {"x": torch.ones(4, 2)}
    loss = lambda module, batch: LossOutput(module(batch["x"]).mean())  # noqa: E731
    anchors, fisher = ({"weight": torch.full((1, 2), value)} for value in (0.0, 1.0))
    plain = float(loss(module, batch).loss.detach())
    penalised = with_ewc(loss, [(anchors, fisher)], 2.0)
    expected = plain + float(module.weight.detach().square().sum())
    assert float(penalised(module, batch).loss.detach()) == pytest.approx(expected)
    assert float(penalised(module.eval(), batch).loss.detach()) == pytest.approx(plain)


def test_the_fisher_information_of_a_linear_model_is_the_closed_form() -> None:
    from types import SimpleNamespace

    module = torch.nn.Linear(3, 1, bias=False)

    def loss(module: torch.nn.Module, batch: dict[str, Tensor]) -> LossOutput:
        return LossOutput(0.5 * (module(batch["x"]).squeeze(1) - batch["labels"]).square().mean())

    rows = {"x": torch.randn(20, 3), "labels": torch.randn(20)}
    session = SimpleNamespace(trainable=SimpleNamespace(module=module, loss=loss))
    found = fisher_information(session, rows, seed=0)  # type: ignore[arg-type]
    residual = (module(rows["x"]).squeeze(1) - rows["labels"]).detach()
    assert torch.allclose(found["weight"], (residual[:, None] * rows["x"]).square().mean(0, keepdim=True), atol=1e-6)


def test_tasks_are_what_their_suite_says() -> None:
    images = draw_images(3, rows=1_200)
    options = ContinualOptions(tasks=3, rows=120, test_rows=40)
    permuted, split, rotating = (
        tasks_of(suite, images, options, seed=1) for suite in ("permuted", "split", "rotating")
    )
    for tasks in (permuted, split, rotating):
        assert [(len(task.train["x"]), len(task.test["labels"])) for task in tasks] == [(120, 40)] * 3
    assert [sorted(task.train["labels"].unique().tolist()) for task in split] == [[0, 1], [2, 3], [4, 5]]
    for one, other in zip(permuted[0].train["x"][:1], permuted[1].train["x"][:1], strict=True):
        assert not torch.equal(one, other)
    pixels = {image.sort().values.numpy().tobytes() for image in images["x"].flatten(1)}
    assert all(row.sort().values.numpy().tobytes() in pixels for task in permuted for row in task.test["x"])
    upright = tasks_of("rotating", images, options, seed=1)[0].train["x"]
    assert torch.allclose(upright, rotating[0].train["x"]) and rotating[2].train["x"].isfinite().all()
    half = rotating[2].test["x"].view(-1, 12, 12)
    assert {image.flip(0, 1).mul(1e3).round().numpy().tobytes() for image in half[:5]} <= {
        image.mul(1e3).round().numpy().tobytes() for image in images["x"]
    }, "the last task is turned by a half turn"
    with pytest.raises(InputError, match=r"tasks.*two classes"):
        tasks_of("split", images, options.model_copy(update={"tasks": 6}), seed=1)


def test_plain_replay_adds_kept_rows_at_half_weight() -> None:
    module = torch.nn.Linear(2, 1)
    seen: list[int] = []

    def loss(module: torch.nn.Module, batch: dict[str, Tensor]) -> LossOutput:
        seen.append(len(batch["labels"]))
        return LossOutput(module(batch["x"]).mean())

    replay = ReplayLoss(10_000, 0)
    wrapped = replay.wrap(loss)
    first = {"x": torch.ones(4, 2), "labels": torch.zeros(4)}
    wrapped(module, first)
    found = wrapped(module, {"x": torch.zeros(4, 2), "labels": torch.zeros(4)})
    assert seen == [4, 4, 4] and len(replay.kept) == 8
    expected = 0.5 * (module(torch.zeros(4, 2)).mean() + module(torch.ones(4, 2)).mean())
    assert float(found.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    assert with_ewc(loss, [], 1.0)(module, first).loss.requires_grad


def test_a_learner_goes_on_from_what_the_task_before_left() -> None:
    options = ContinualOptions(tasks=2, rows=120, test_rows=60, steps=12)
    task, _ = tasks_of("permuted", draw_images(3, rows=1_200), options, seed=1)
    (first, _), (second, _) = learn_tasks("plain", [task, task], options, seed=1, experts=None)["matrix"]
    assert second > first + 0.1, "twice as many steps on the same task"


@pytest.mark.long
@pytest.mark.covers("TEST-07")
def test_a_small_run_measures_every_arm_on_every_suite(tmp_path: Path) -> None:
    out = tmp_path / "continual.json"
    code = bench_verb(
        "continual", ["rows=70", "test_rows=20", "sleep_every=6"], out=str(out), quick=True, as_json=False
    )
    document = json.loads(out.read_text())
    assert code == 0, document["gate"]
    for suite in ("permuted", "split", "rotating"):
        arms = document["values"]["results"][suite]
        assert list(arms) == list(ARMS)
        for arm, (row,) in arms.items():
            assert np.shape(row["matrix"]) == (2, 2)
            assert row["kept_bytes"] <= 400_000 and bool(row["kept_bytes"]) == (arm in ("lifecycle", "replay"))
            assert bool(row["replayed"]) == (arm in ("lifecycle", "replay"))
        assert arms["fixed"][0]["experts"] == [max(arms["lifecycle"][0]["experts"])] * 2
        assert arms["replay"][0]["replayed"] == 2 * 12 * BATCH
        assert arms["plain"][0]["untrained"] == arms["ewc"][0]["untrained"] == arms["replay"][0]["untrained"]
    claims = [claim["effect"] for claim in document["claims"]]
    assert (
        sum("half of plain" in claim for claim in claims)
        == sum("level with plain replay" in claim for claim in claims)
        == 3
    )
