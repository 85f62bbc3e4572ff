"""The worker's device, its generators, and tensors that are not where they should be."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from lab import MLP, Rows, class_rows, make_session, optimizer_state, train
from torch import Tensor, nn

from raytrain.accelerator import worker_device
from raytrain.checkpoint.snapshot import flatten, unflatten
from raytrain.data.prepare import DeviceGuard
from raytrain.data.rows.residency import tensors_of
from raytrain.errors import DevicePlacementError
from raytrain.train.device import rng_state, seed_everything, set_determinism, set_rng_state

CPU = torch.device("cpu")
DATA = {"train": class_rows(64), "eval_fraction": 0.0}


def with_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """torch as it answers on a machine with `count` GPUs; the list holds what was made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_each_worker_of_a_node_gets_its_own_gpu_and_index(monkeypatch: pytest.MonkeyPatch) -> None:
    current = with_gpus(4, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = [worker_device("cuda", local_rank=rank) for rank in range(4)]
    assert devices == [torch.device("cuda", rank) for rank in range(4)] == current
    with_gpus(1, monkeypatch)  # Ray shows a worker its own GPU alone
    assert worker_device("cuda", local_rank=3) == torch.device("cuda", 0)


def test_workers_beyond_the_one_mig_device_that_cuda_shows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray shares the devices of all workers of a node; both processes would use the first, and NCCL refuses that."""
    with_gpus(1, monkeypatch)
    for visible in ("MIG-a,MIG-b", "0,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert worker_device("cuda", local_rank=0) == torch.device("cuda", 0)
        with pytest.raises(DevicePlacementError, match=rf"scale\.workers: got 2 .* devices {visible} .*MIG"):
            worker_device("cuda", local_rank=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a")
    assert worker_device("cuda", local_rank=1) == torch.device("cuda", 0), "a share of it each"


def test_a_planned_gpu_that_torch_does_not_see_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(0, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(DevicePlacementError, match=r"torch .* sees none .*'7'.*scale\.mode=cpu"):
        worker_device("cuda", local_rank=0)
    assert worker_device("cpu", local_rank=5) == CPU


@pytest.mark.covers("DEV-04")
def test_everything_of_a_worker_is_on_its_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("fp32", "fp16"):
        session = make_session(MLP, DATA, precision=precision, loop={"max_steps": 3})
        batches: list[Any] = []
        inner = session.step.forward
        session.step.forward = lambda batch, **more: (batches.append(batch), inner(batch, **more))[1]  # noqa: B023
        train(session)
        parts = [session.trainable.module, optimizer_state(session), batches, session.step.gradients.buffers]
        tensors = dict(tensors_of([*parts, session.step.scale.value], "all"))
        assert len(tensors) > 20 and {tensor.device for tensor in tensors.values()} == {session.device}
        assert session.device == worker_device("cpu", local_rank=0)
    # with an index wherever there can be one, so that `cuda` never stands beside `cuda:0`
    with_gpus(2, monkeypatch)
    assert [worker_device("cuda", local_rank=rank).index for rank in (0, 1)] == [0, 1]


class WithBuffer(nn.Module):
    """A linear model with a buffer that nobody has given values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"linear": nn.Linear(12, 4)})
        self.inner["linear"].register_buffer("shift", torch.empty(4, device="meta"))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.inner["linear"](x), labels)}


@pytest.mark.covers("DEV-06", "BP-04", "TRB-16")
def test_a_buffer_on_another_device_is_reported_before_the_first_step() -> None:
    session = make_session({"module": WithBuffer()}, DATA, prepare=False)
    with pytest.raises(DevicePlacementError, match=r"inner\.linear\.shift.*meta"):
        session.prepare("fp32")
    assert session.state.step == 0 and not hasattr(session, "step")
    module = WithBuffer()
    module.inner["linear"].shift = torch.zeros(4)
    make_session({"module": module}, DATA)  # the buffer alone was in the way


@pytest.mark.covers("DEV-08")
@pytest.mark.parametrize("when", ["before its forward", "after its backward", "between the steps", "a buffer"])
def test_a_weight_that_is_moved_at_step_five_stops_the_run_there_and_is_named(when: str) -> None:
    module = WithBuffer()
    module.inner["linear"].shift = torch.zeros(4)
    session = make_session({"module": module}, DATA, loop={"max_steps": 9})
    module = session.trainable.module  # a copy of it
    linear = module.inner["linear"]

    def move(*_: Any) -> None:
        if when == "a buffer":
            linear.shift = torch.zeros(4, device="meta")
        else:
            linear.weight = nn.Parameter(linear.weight.detach().to("meta"))

    def at_step_five(*_: Any) -> None:
        if session.state.step + 1 == 5:
            move()

    if when in ("before its forward", "a buffer"):
        module.register_forward_pre_hook(at_step_five)
    elif when == "after its backward":
        linear.bias.register_hook(lambda grad: at_step_five())
    else:
        session.trainable.between_steps = lambda step: move() if step == 4 else None
    reporter = Rows()
    name = r"inner\.linear\.shift" if when == "a buffer" else r"inner\.linear\.weight"
    with pytest.raises(DevicePlacementError, match=name + r" is on meta, expected every tensor on cpu"):
        session.loop(reporter=reporter, should_stop=lambda: False).run(session.state)
    assert reporter.of("train", "step") == [1, 2, 3, 4]


def test_placement_does_not_change_modules() -> None:
    """A tied weight, a buffer that is None, a module without a tensor."""
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    module.register_buffer("nothing", None)
    place = DeviceGuard(module, CPU)
    place.check()
    with place.guarded():
        module(torch.zeros(1, 3))
    with pytest.raises(RuntimeError, match="shapes"), place.guarded():  # a failure of its own stays what it is
        module(torch.zeros(1, 4))


def draws() -> list[Any]:
    numpys = [np.random.random(3).tolist(), np.random.normal()]
    return [torch.rand(3).tolist(), *numpys, random.random(), random.gauss(0, 1)]


def test_generators_continue_from_their_saved_state() -> None:
    seed_everything(5)
    draws()
    np.random.normal(), random.gauss(0, 1)  # both keep a second number back
    flat = flatten(rng_state(CPU))  # as a checkpoint holds it: tensors and JSON
    expected = draws()
    seed_everything(6)
    assert draws() != expected
    set_rng_state(unflatten(flat.tensors, flat.skeleton), CPU)
    assert draws() == expected


def test_a_seed_fixes_every_generator() -> None:
    seed_everything(2**40 + 3)
    first = draws()
    seed_everything(2**40 + 3)
    assert draws() == first
    seed_everything(2**40 + 4)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_determinism_is_switched_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)
    benchmark = torch.backends.cudnn.benchmark
    try:
        set_determinism(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert os.environ["NCCL_ALGO"] == "^NVLS", "NVLink SHARP sums in any order"
        monkeypatch.setenv("NCCL_ALGO", "Ring")
        set_determinism(deterministic=True)
        assert os.environ["NCCL_ALGO"] == "Ring", "the user's choice"
    finally:
        set_determinism(deterministic=False)
        torch.backends.cudnn.benchmark = benchmark
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
