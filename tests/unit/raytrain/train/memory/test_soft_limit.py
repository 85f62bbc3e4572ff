"""A process that uses more memory than a soft limit says so once, and names its largest tensors."""

from __future__ import annotations

import gc
import mmap
import os
import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cluster.telemetry.processes import process_memory
from raytrain.train.memory.soft_limit import LISTED, SoftLimit, SoftLimitWarning, largest_tensors, table, watched_memory

MB = 10**6
KEPT: list[torch.Tensor] = []


def fresh(numbers: int) -> torch.Tensor:
    """fp32 ones on new pages: malloc may have kept as much of what other tests have freed, which is in use already."""
    pages = mmap.mmap(-1, 4 * numbers, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32).fill_(1.0)


@pytest.mark.covers("MEM-07")
def test_200_mb_above_a_limit_100_mb_away_give_one_warning_with_the_tensor_and_who_keeps_it() -> None:
    found: queue.Queue[SoftLimitWarning] = queue.Queue()
    gc.collect()
    # without the pages of files, which the kernel may take away at any time
    limit, looked, filled = process_memory().anonymous + 100 * MB, queue.Queue[int](), threading.Event()

    def used() -> int:
        now = process_memory().anonymous
        looked.put(now)
        return now if filled.is_set() else min(now, limit)  # while it is filled, no Python object has it

    watch = SoftLimit(limit=lambda: limit, used=used, tensors=largest_tensors, who=f"rank 0 (pid {os.getpid()}) on n")
    try:
        with watched_memory(watch, every=0.01, warn=found.put) as thread:
            assert thread is not None
            for _ in range(3):
                assert looked.get(timeout=60) <= limit
            assert found.empty(), "not before"
            KEPT.append(fresh(50 * MB))
            filled.set()
            warning = found.get(timeout=60)
            KEPT.append(fresh(25 * MB))
            thread.join(60)
            assert not thread.is_alive(), "it has warned: nothing is left to look for"
        assert found.empty() and watch.look() is None
    finally:
        KEPT.clear()
    first = warning.tensors[0]
    assert (first.shape, first.dtype, first.bytes, first.device) == ((50 * MB,), "float32", 200 * MB, "cpu")
    assert warning.figures["used"] > warning.figures["total"] == limit
    assert warning.figures["tensors"][0]["shape"] == (50 * MB,)
    assert "191 MiB float32 [50000000]" in warning.text and "cluster.memory_soft_limit" in warning.text
    evidence, _, remedy = warning.text.partition(": ")
    assert "float32" in evidence and remedy.startswith("lower loop.micro_batch_size"), "as the report divides it"
    assert table(warning.tensors).splitlines()[0] == "191 MiB float32 [50000000] on cpu"


class Net(nn.Module):
    """Weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3000, 2000, bias=False)
        self.register_buffer("mask", torch.ones(11 * MB))


def test_tensors_of_the_training_have_their_names_and_memory_is_counted_once() -> None:
    net = Net()
    flat = torch.zeros(6 * MB)
    net.inner.weight.grad = flat.view(2000, 3000)
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.step()
    session: Any = SimpleNamespace(
        trainable=SimpleNamespace(module=net), optimizers=[optimizer], device=torch.device("cpu")
    )
    found = {one.holder: one.bytes for one in largest_tensors(session)}
    expected = {
        "buffer mask": 44 * MB,
        "parameter inner.weight": 24 * MB, "gradient inner.weight": 24 * MB,
        "optimizer state exp_avg of inner.weight": 24 * MB, "optimizer state exp_avg_sq of inner.weight": 24 * MB,
    }  # fmt: skip
    assert expected.items() <= found.items(), "another test may have left a large tensor"
    assert len(largest_tensors(session)) <= LISTED
    shared = nn.Linear(4, 4, bias=True)
    both = torch.zeros(13 * MB)
    shared.weight.grad, shared.bias.grad = both[:16].view(4, 4), both[16:20]
    session.trainable.module = shared
    largest = next(one for one in largest_tensors(session) if one.holder)
    assert largest.holder == "gradient weight" and largest.bytes == 52 * MB


def test_without_a_limit_nothing_is_said_and_tensors_are_not_looked_for() -> None:
    def never() -> list[Any]:
        raise AssertionError("only when the warning is due")

    limits = iter([None, 100, 100])
    watch = SoftLimit(limit=lambda: next(limits), used=lambda: 100, tensors=never, who="rank 0")
    assert watch.look() is None and watch.look() is None, "as much as the limit is not more"
    with watched_memory(watch, every=0.0, warn=lambda _: None) as thread:
        assert thread is None
