"""What the first-batch check finds of a job whose global batches are split or end with few rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cluster.devices.inventory import Device, Inventory, Node
from jobs.driver.check_job import Checked, check_on_driver
from jobs.driver.planning import plan_job
from jobs.job.spec import LoadedSpec, load_spec
from raytrain.errors import InputError
from raytrain.plan.choice import Resolved

BOX = Inventory(nodes=(Node("box", 8, 16 << 30),), source="a test", cpu_model="Test CPU", cpu_flags={})


class Regression(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), *parts, nn.Linear(6, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(self.net(x), labels)}


class Ranking(Regression):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)[:, 0]
        return {"loss": -(F.logsigmoid(out[:, None] - out) * (labels > labels.T)).mean()}


class ManyRows(Regression):
    """Fails on less than three rows."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training and len(x) < 3:
            raise RuntimeError("needs three rows")
        return super().forward(x, labels)


def job(module: nn.Module, rows: int = 32, *, dtype: torch.dtype = torch.float32, **sections: Any) -> LoadedSpec:
    x = torch.randn(rows, 4, dtype=dtype, generator=torch.Generator().manual_seed(2))
    mapping: dict[str, Any] = {
        "model": {"module": module},
        "data": {"train": {"x": x, "labels": x[:, :1] * 2}, "eval_fraction": 0},
        "precision": {"dtype": "fp32"},
        "scale": {"mode": "cpu"},
        "loop": {"global_batch_size": 8, "epochs": 1},
    }
    for name, section in sections.items():
        mapping[name] = {**mapping.get(name, {}), **section}
    return load_spec(mapping=mapping)


def checked(loaded: LoadedSpec) -> Checked:
    return check_on_driver(loaded.spec)


def warned(loaded: LoadedSpec) -> list[str]:
    found = checked(loaded)
    facts = {"model_facts": found.model_facts, "data_facts": found.data_facts}
    plan = plan_job(loaded, inventory=BOX, split=found.first.split, **facts)
    return [text for text in plan.warnings if "global batch" in text or "how often" in text]


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (Ranking(), ["of 8 rows as a whole", "from several rows"]),
        (Regression(nn.BatchNorm1d(6), nn.Dropout(0.5)), ["batch norms"]),
    ],
)
def test_a_plan_that_splits_a_loss_of_the_whole_batch_warns(module: nn.Module, parts: list[str]) -> None:
    for sections in ({"loop": {"micro_batch_size": 4}}, {"scale": {"workers": 2}}):
        (text,) = warned(job(module, **sections))
        assert all(part in text for part in [*parts, "loop.micro_batch_size whole"])
        assert "unless memory runs out" not in text
    (text,) = warned(job(module))  # auto, on one worker
    assert all(part in text for part in [*parts, "unless memory runs out"])


def test_a_plan_that_does_not_split_says_nothing() -> None:
    for size in ("whole", 8):
        loaded = job(Ranking(), loop={"micro_batch_size": size})
        assert checked(loaded).first.split is None and not warned(loaded)
    assert not warned(job(Regression(nn.Dropout(0.5)), loop={"micro_batch_size": 4}))


def test_float64_columns_are_compared_and_tried_as_they_are_trained() -> None:
    found = checked(job(Ranking(), dtype=torch.float64))
    assert found.first.skipped is None and found.first.split is not None
    assert found.model_facts.flops_per_sample, "a pass is counted"


def test_a_float64_column_that_the_model_cannot_take_is_named() -> None:
    loaded = job(Regression(), data={"train": {"x": 1.7e9 + torch.rand(32, 4).double(), "labels": torch.rand(32, 1)}})
    with pytest.raises(InputError, match=r"data\.train: .*float64.*: x, as float32 would round") as caught:
        checked(loaded)
    assert caught.value.exit_code == 2


NORM = Regression(nn.BatchNorm1d(6))


@pytest.mark.parametrize(
    ("module", "rows", "sections"),
    [
        (NORM, 33, {}),
        (NORM, 33, {"loop": {"micro_batch_size": 4}}),
        (NORM, 33, {"scale": {"workers": 2}}),
        (NORM, 37, {"loop": {"micro_batch_size": 4}}),
        (NORM, 33, {"loop": {"max_steps": 5, "epochs": None}}),
        (ManyRows(), 34, {}),
    ],
)
def test_last_rows_of_an_epoch_on_which_a_model_fails_are_found(
    module: nn.Module, rows: int, sections: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=r"data\.drop_last: got .*drop_last=true.*loop\.global_batch_size"):
        checked(job(module, rows, **sections))
    loop = sections.get("loop", {})
    assert checked(job(module, rows, **{**sections, "data": {"drop_last": True}, "loop": loop})).first.skipped is None


@pytest.mark.parametrize(
    ("module", "rows", "sections"),
    [
        (NORM, 32, {}),
        (NORM, 34, {}),
        (NORM, 33, {"loop": {"max_steps": 4, "epochs": None}}),
        (NORM, 34, {"loop": {"micro_batch_size": 4}}),
        (Regression(), 33, {}),
        (Regression(nn.BatchNorm1d(6).eval()), 32, {}),
        (ManyRows(), 35, {}),
    ],
)
def test_other_numbers_of_rows_pass(module: nn.Module, rows: int, sections: dict[str, Any]) -> None:
    assert checked(job(module, rows, **sections)).first.skipped is None


def test_a_last_row_of_every_global_batch_is_found() -> None:
    loaded = job(NORM, 27, loop={"global_batch_size": 9}, scale={"workers": 8})  # micro-batches of 2 rows, and of 1
    with pytest.raises(InputError, match=r"loop\.micro_batch_size: got 1 row in the last micro-batch of a global"):
        checked(loaded)


# ---------------------------------------------------------------- whole


CARDS = tuple(Device("cuda", "NVIDIA H100", 80 << 30, (9, 0), f"GPU-{index}", index) for index in range(4))
GPUS = Inventory(nodes=(Node("box", 32, 64 << 30, devices=CARDS),), source="a test", cpu_model="Test CPU", cpu_flags={})


@pytest.mark.parametrize("machines", [BOX, GPUS])
def test_whole_is_one_worker_and_one_pass(machines: Inventory) -> None:
    loaded = job(Ranking(), loop={"micro_batch_size": "whole"}, scale={"mode": "auto"})
    found = checked(loaded)
    plan = plan_job(loaded, inventory=machines, model_facts=found.model_facts, data_facts=found.data_facts)
    assert [getattr(plan, name).value for name in ("workers", "micro_batch_size", "accumulation")] == [1, 8, 1]
    assert isinstance(plan.micro_batch_size, Resolved) and "whole" in plan.micro_batch_size.reason


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"scale": {"workers": 2}}, r"scale\.workers: got 2 with loop\.micro_batch_size whole"),
        ({"scale": {"workers": [2, 4]}}, r"scale\.workers: .*loop\.micro_batch_size whole"),
        ({"data": {"tokens_per_batch": 64}}, r"data\.tokens_per_batch: .*loop\.micro_batch_size whole"),
    ],
)
def test_what_splits_is_refused_with_whole(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        job(Ranking(), loop={"micro_batch_size": "whole"}, **sections)
    assert caught.value.exit_code == 2


def test_an_elastic_number_of_workers_from_one_is_one() -> None:
    loaded = job(Ranking(), loop={"micro_batch_size": "whole"}, scale={"workers": [1, 4]})
    assert plan_job(loaded, inventory=BOX).workers.value_or(None) == 1
