"""Copies of a GPU's tensors, on a stand-in: streams whose work is done as late as their order allows.

A tensor of it shows its values to nothing but a copy to the CPU, and to work on its streams.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from lab import GPT, make_session, token_rows
from torch import Tensor

from raytrain.checkpoint import snapshot
from raytrain.checkpoint.reader import load
from raytrain.checkpoint.snapshot import Staging, before_update
from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.runs.folder import RunFolder
from raytrain.trainable import GlobalStep

CUDA = torch.device("cuda", 0)
DEVICE = threading.RLock()
"""Held by the thread whose wait makes the device work."""


class Event:
    """Done when the work before it is."""

    def __init__(self, **_: Any) -> None:
        self.done = True

    def record(self, stream: Stream) -> None:
        self.done, self.stream = False, stream
        stream.work.append(self._reached)

    def _reached(self) -> bool:
        self.done = True
        return True

    def synchronize(self) -> None:
        self.stream.run(until=self)


class Stream:
    """Work in order; each piece returns whether it could be done yet."""

    def __init__(self, _device: torch.device = CUDA) -> None:
        self.work: deque[Callable[[], bool]] = deque()

    def add(self, work: Callable[[], Any]) -> None:
        self.work.append(lambda: (work(), True)[1])

    def wait_event(self, event: Event) -> None:
        self.work.append(lambda: event.done or (event.synchronize(), True)[1])

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def run(self, until: Event | None = None) -> None:
        """Do the work up to an event, and of other streams only what it waits for."""
        with DEVICE:
            while self.work and not (until is not None and until.done):
                self.work.popleft()()


class Gpu:
    """What `torch.cuda` is in a test."""

    def __init__(self) -> None:
        self.training = self.current = Stream()
        self.recorded: list[Tensor] = []

    def current_stream(self, _device: Any = None) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


GPU = Gpu()


class OnGpu(Tensor):
    """A tensor of the stand-in; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnGpu:
        made: Any = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=CUDA)  # type: ignore[attr-defined]
        made.held = values
        return made

    def to_local(self) -> OnGpu:
        return self

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        GPU.recorded.append(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "aten::detach":
            return OnGpu(args[0].held)
        if name == "aten::copy_" and type(args[0]) is Tensor:
            assert args[2], "a copy that the host waits for"
            GPU.current.add(partial(args[0].copy_, args[1].held))
            return args[0]
        if name == "aten::_to_copy" and kwargs["device"].type == "cpu":
            GPU.current.run()
            return args[0].held.clone()
        raise AssertionError(f"{name} of a tensor on a GPU")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    GPU.__init__()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    for name in ("current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(GPU, name))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(snapshot, "_UNREAD", [])
    return GPU


def parts(elements: int) -> dict[str, dict[str, OnGpu]]:
    """A state of `elements` ones in each of its tensors."""
    names = {"model": ("weight", "running_mean"), "optimizer": ("exp_avg", "exp_avg_sq"), "part_load": ("counts",)}
    return {part: {name: OnGpu(torch.ones(elements)) for name in tensors} for part, tensors in names.items()}


def add(state: dict[str, OnGpu]) -> None:
    """Queue work of the training that changes all of these tensors."""
    for tensor in state.values():
        GPU.training.add(partial(tensor.held.add_, 1))


@pytest.mark.parametrize("elements", [3, 1000])
@pytest.mark.parametrize("saves", [1, 3])
def test_passes_and_update_change_nothing_that_a_snapshot_holds(gpu: Gpu, elements: int, saves: int) -> None:
    staging, state = Staging(), parts(elements)
    for number in range(1, saves + 1):
        copied = staging.copy(state)
        assert all(tensor.held.eq(number).all() for tensor in state["optimizer"].values())
        add(state["model"])  # a pass: running statistics, and weights that forward changes
        add(state["part_load"])
        gpu.training.run()
        assert len(staging._streams[CUDA].work) == 3, "the optimizers' two copies, and that they have arrived"
        before_update()
        add(state["optimizer"])
        gpu.training.run()
        staging.wait()
        assert all(tensor.eq(number).all() for named in copied.values() for tensor in named.values()), number
        assert all(tensor.held.eq(number + 1).all() for named in state.values() for tensor in named.values())
        assert len(gpu.recorded) == 5 * number, "memory that only the copy needs is kept until it is done"


def test_a_snapshot_is_of_what_was_queued_before_it_and_the_host_waits_for_nothing(gpu: Gpu) -> None:
    staging, state = Staging(), parts(4)
    for tensors in state.values():
        add(tensors)
    copied = staging.copy(state)
    assert state["model"]["weight"].held.eq(1).all(), "not computed yet"
    staging.wait()
    assert all(tensor.eq(2).all() for named in copied.values() for tensor in named.values())


def test_the_update_of_a_step_waits(gpu: Gpu) -> None:
    session = make_session(GPT, {"train": token_rows(32), "eval_fraction": 0.0})
    staging = Staging()
    staging.copy(parts(2))
    gpu.training.run()
    assert not staging._arrived[0].done
    no, one = torch.tensor(False), torch.ones((), dtype=torch.float64)
    session.step.update(GlobalStep(norm=one, skip=no, counts=None), step=1)
    gpu.training.run()
    assert staging._arrived[0].done


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("elements", [3, 300_000])
def test_a_checkpoint_of_a_gpu_is_written_with_and_without_a_thread(
    gpu: Gpu, tmp_path: Any, asynchronous: bool, elements: int
) -> None:
    run, state = RunFolder.create(str(tmp_path), "run"), parts(elements)
    with CheckpointWriter(run, keep=3, asynchronous=asynchronous) as writer:
        for step in (1, 2):
            writer.save(state, {}, step=step)
            for changed in ("model", "part_load"):
                add(state[changed])
            before_update()
            add(state["optimizer"])
            gpu.training.run()
        assert (writer.staged_bytes > 0) is asynchronous
    for step in (1, 2):
        loaded = load(run.checkpoint_dir(step)).parts
        assert all(tensor.eq(step).all() for named in loaded.values() for tensor in named.values())


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ([154, 154, 154, *[9.4] * 24, *[7.1] * 12, *[2.4] * 12, *[9.4, 7.1, 2.4] * 24], 1.1),  # a GPT-2's state
        ([4.0], 1.0), ([5.0], 1.6), ([5.0] * 40, 1.1), ([1024.0, 1024.0, 512.0], 1.0), ([0.001] * 50, 40.0),
    ],
)  # fmt: skip
def test_pinned_memory_is_in_powers_of_two_that_the_tensors_fill(
    gpu: Gpu, sizes: list[float], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sizes` in MiB (of memory that is never touched); `most`: times their sum that is allocated."""
    empty, pinned = torch.empty, list[int]()

    def allocated(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        pinned.extend([made.nbytes] if options.get("pin_memory") else [])
        return made

    monkeypatch.setattr(torch, "empty", allocated)
    staging = Staging()
    wanted = {
        ("model", str(n)): OnGpu(empty(round(size * 2**18) or 1, dtype=torch.float32)) for n, size in enumerate(sizes)
    }
    staging._allocate(wanted)
    assert all(size & (size - 1) == 0 and size >= 2**21 for size in pinned)
    assert staging.nbytes == sum(pinned) <= most * 2**20 * sum(sizes)
    places = sorted((one.data_ptr(), one.nbytes) for one in staging._buffers.values())
    assert all(a + size <= b for (a, size), (b, _) in pairwise(places)), "none overlaps another"
    assert all(one.storage_offset() * one.itemsize % 512 == 0 for one in staging._buffers.values())
    before = dict(staging._buffers)
    staging._allocate({**wanted, ("scaler", "scale"): OnGpu(torch.ones(()))})
    assert all(staging._buffers[key] is buffer for key, buffer in before.items()), "only what is new is allocated"
