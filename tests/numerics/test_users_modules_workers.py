"""Modules as users bring them on two and three workers, against a plain loop over the whole batch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.numerics.gang import run_gang
from tests.numerics.guests import KINDS, live, plain, refused

STEPS = 4


def apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def assert_as_plain(kind: str, sections: dict[str, Any], *, world_size: int) -> None:
    expected, found = plain(kind, STEPS), run_gang(live, kind, sections, STEPS, world_size=world_size)
    for one in found:
        assert one["losses"] == pytest.approx(expected["losses"], abs=1e-10)
        assert one["own"] == {} or apart(one["own"], found[0]["own"]) == 0
    assert apart(found[0]["full"], expected["full"]) < 1e-10


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "domains"])
def test_two_workers_train_a_users_module_as_a_plain_loop_does(kind: str) -> None:
    """One worker has a micro-batch more than the other; with `ignoring`, the first has nothing to average over."""
    assert_as_plain(kind, {"loop": {"micro_batch_size": 4}}, world_size=2)


@pytest.mark.parametrize("kind", ["branch", "ignoring"])
def test_a_worker_without_rows_changes_nothing(kind: str) -> None:
    assert_as_plain(kind, {"loop": {"micro_batch_size": 6}}, world_size=3)


@pytest.mark.parametrize("kind", ["weighted", "ignoring", "told"])
def test_sharded_workers_weigh_a_mean_as_a_plain_loop_does(kind: str) -> None:
    assert_as_plain(kind, {"loop": {"micro_batch_size": 3}, "scale": {"strategy": "fsdp"}}, world_size=2)


def test_weights_with_gaps_in_memory_train_where_no_conversion_closes_them() -> None:
    expected, found = plain("sliced", STEPS, dtype=torch.float32), live(0, 1, "sliced", {"dtype": "fp32"}, STEPS)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert apart(found["full"], expected["full"]) < 1e-5


def test_synchronized_norms_that_only_some_workers_call_are_named_on_every_worker() -> None:
    """Row 4 alone has a large first feature. gloo would end the processes."""
    sections = {"loop": {"micro_batch_size": 4}, "scale": {"sync_batchnorm": True}}
    for text in run_gang(refused, "domains", sections, world_size=3):
        assert text.startswith("scale.sync_batchnorm needs one order of batch norms on all workers, but in pass 1 ")
        assert "norms.0" in text and "norms.1" in text


def test_a_number_of_a_sharded_weight_is_refused_outside_its_block() -> None:
    sections = {"loop": {"micro_batch_size": 6}, "scale": {"strategy": "fsdp"}}
    for text in run_gang(refused, "reads a block", sections, world_size=2):
        assert text.startswith("scale.strategy: got fsdp with a model that does not work in shards (detach of a weight")
