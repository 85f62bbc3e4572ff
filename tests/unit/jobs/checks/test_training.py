"""The trainings of `raytrain check`: the products are computed in the format that the line names."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from jobs.checks import training
from jobs.driver.local_session import worker_job
from raytrain.train.parallel.collectives import Workers
from raytrain.train.precision import PrecisionPolicy


def results(dtype: str, *, workers: int = 1) -> tuple[dict[str, Any], Any]:
    """The row of a worker, and the result for the format."""
    job, source = worker_job(training.small_job(workers=1, threads=1, mode="cpu", dtype=dtype))
    row = {**training._train((job, source.worker_data), Workers(), 0), "rank": 0}
    (found,) = [one for one in training.check_training([row], workers=workers) if one.name.startswith("training")]
    return row, found


@pytest.mark.covers("VER-04")
@pytest.mark.parametrize(("dtype", "format"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_a_training_in_a_format_has_products_in_it_and_a_falling_loss(dtype: str, format: str) -> None:
    row, found = results(dtype)
    assert set(row["products"]) == {format} and row["products"][format] >= 2 * 2 * 4, "each layer in each step"
    assert found.name == f"training in {dtype}" and found.status == "ok" and f"products in {format}" in found.seen
    assert row["losses"][1] < row["losses"][0]


def test_products_in_another_format_than_the_one_named_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrecisionPolicy, "autocast", lambda policy, device: contextlib.nullcontext())
    row, found = results("bf16")
    assert set(row["products"]) == {"float32"}
    assert found.status == "fail" and "computes its products in float32" in found.seen
    assert "products in bfloat16" in found.expected


def test_one_product_that_stays_in_another_format_is_no_failure() -> None:
    row, _ = results("bf16")
    row["products"]["float32"] = 1
    assert training.check_training([row], workers=1)[0].status == "ok"
    row["products"]["float32"] = row["products"]["bfloat16"] + 1
    assert training.check_training([row], workers=1)[0].status == "fail"
    row["products"] = {}
    assert training.check_training([row], workers=1)[0].status == "fail"


def test_every_kind_of_product_is_seen() -> None:
    a, b = torch.ones(3, 4, dtype=torch.float64), torch.ones(4, 5, dtype=torch.float64)
    with training._products() as found:
        a @ b
        torch.addmm(torch.ones(5, dtype=torch.float64), a, b)
        torch.bmm(a[None], b[None])
        torch.conv1d(torch.ones(1, 1, 8), torch.ones(1, 1, 3))
    assert found == {"float64": 3, "float32": 1}
