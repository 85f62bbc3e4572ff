"""When a bucket's sum begins: in one order, when it is whole, the first one after the passes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain.errors import RunError
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.train.parallel.reduction import BucketSums


class TwoWorkers:
    """This worker as one of two, of which rank 0 may say another order than this one saw."""

    world_size, rank = 2, 1

    def __init__(self, order: list[int] | None = None) -> None:
        self.order = order
        self.begun: list[Tensor] = []
        self.waited: list[Tensor] = []

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        self.begun.append(tensor)
        return lambda: self.waited.append(tensor)

    def broadcast_object(self, value: Any) -> Any:
        return value if self.order is None else self.order


def three(workers: Any) -> tuple[nn.Sequential, BucketSums, Callable[[], list[int]]]:
    """Three layers of one parameter, each a bucket; which have begun."""
    module = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    gradients = GradientBuffers(module.parameters(), bucket_bytes=4, with_flags=True)
    sums = BucketSums(gradients, workers=workers)
    sums.overlaps = True

    def begun() -> list[int]:
        places = {payload.data_ptr(): index for index, payload in enumerate(gradients.payloads)}
        return [places[tensor.data_ptr()] for tensor in workers.begun]

    return module, sums, begun


def step(module: nn.Module, sums: BucketSums, *, passes: int = 1, told: bool = True) -> None:
    """The passes of a step, the last of which is announced."""
    with sums.inside():
        for number in range(passes):
            if told and number + 1 == passes:
                sums.last_pass()
            module(torch.ones(2, 4)).sum().backward()


def test_the_first_step_shows_the_order_and_the_next_begins_inside_its_last_pass_alone() -> None:
    workers = TwoWorkers()
    module, sums, begun = three(workers)
    step(module, sums, passes=2)
    assert begun() == []
    sums.finish(learn=True)
    assert begun() == [2, 1, 0] and len(workers.waited) == 3
    workers.begun.clear()
    step(module, sums, passes=1, told=False)
    assert begun() == []
    sums.finish(learn=True)
    workers.begun.clear()
    step(module, sums, passes=3)
    assert begun() == [2, 1], "the first bucket takes what is said after the passes"
    sums.finish(learn=True)
    assert begun() == [2, 1, 0] and len(workers.waited) == 9


def test_the_order_is_that_of_rank_0_and_a_bucket_waits_for_those_before_it() -> None:
    workers = TwoWorkers([1, 2, 0])
    module, sums, begun = three(workers)
    step(module, sums)
    sums.finish(learn=True)
    workers.begun.clear()
    step(module, sums)
    assert begun() == [1, 2]
    sums.finish(learn=True)
    workers.begun.clear()
    module[1].requires_grad_(False)
    step(module, sums)
    assert begun() == [], "bucket 2 is whole, and 1 is to begin first"
    sums.finish(learn=True)
    assert begun() == [1, 2, 0]


def test_no_order_is_learned_if_rank_0_saw_none() -> None:
    workers = TwoWorkers()
    module, sums, begun = three(workers)
    with sums.inside():
        pass
    sums.finish(learn=True)
    step(module, sums)
    sums.finish(learn=False)  # it ran out of memory behind its backward
    workers.begun.clear()
    step(module, sums)
    assert begun() == []
    sums.finish(learn=True)
    workers.begun.clear()
    step(module, sums)
    assert begun() == [2, 1]


def test_passes_outside_a_step_start_no_reduction_and_a_failed_step_leaves_none_pending() -> None:
    workers = TwoWorkers()
    module, sums, begun = three(workers)
    step(module, sums)
    sums.finish(learn=True)
    workers.begun.clear()
    sums.last_pass()
    module(torch.ones(2, 4)).sum().backward()
    assert begun() == [], "a probe's"
    with pytest.raises(ValueError, match="planted"), sums.inside():
        sums.last_pass()
        module(torch.ones(2, 4)).sum().backward()
        raise ValueError("planted")
    assert begun() == [2, 1] and len(workers.waited) == 3
    step(module, sums)
    sums.finish(learn=True)
    assert begun() == [2, 1, 2, 1, 0]


def test_a_gradient_in_two_parts_is_delayed_if_known_and_refused_if_not() -> None:
    workers = TwoWorkers()
    module, sums, begun = three(workers)
    with sums.inside():
        sums.last_pass()
        module(torch.ones(2, 4)).sum().backward()
        module[2](torch.ones(2, 4)).sum().backward()
    sums.finish(learn=True)
    workers.begun.clear()
    step(module, sums)
    assert begun() == [1], "bucket 2 has gone behind it, and waits for the end"
    with pytest.raises(RunError, match=r"two parts .* scale.overlap: false"):
        sums.add_gradient(1, 0, module[1].weight)  # pyright: ignore[reportArgumentType]
        with sums.inside():
            sums.last_pass()
            module(torch.ones(2, 4)).sum().backward()
            module[1](torch.ones(2, 4)).sum().backward()


def test_one_worker_or_one_bucket_never_overlaps_and_overlap_can_be_disabled() -> None:
    workers = TwoWorkers()
    workers.world_size = 1
    assert not three(workers)[1].overlaps
    one = BucketSums(GradientBuffers([nn.Parameter(torch.ones(3))]), workers=TwoWorkers())  # type: ignore[arg-type]
    one.overlaps = True
    assert not one.overlaps
    workers = TwoWorkers()
    module, sums, begun = three(workers)
    step(module, sums)
    sums.finish(learn=True)
    sums.overlaps = False
    workers.begun.clear()
    step(module, sums)
    assert begun() == [] and not sums.overlaps


def test_parameters_do_not_keep_it_alive() -> None:
    module, sums, _ = three(TwoWorkers())
    kept = weakref.ref(sums)
    del sums, _
    gc.collect()
    assert kept() is None
    module(torch.ones(2, 4)).sum().backward()
