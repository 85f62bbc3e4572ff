"""What a GPU itself must show: it is seen, its memory errors are recognised, and its kernels are right."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster.devices.inventory import local_inventory
from experts.config import LayerShape
from experts.grouped import GroupedExperts, Shape, why_not
from experts.member.shard import ExpertShard
from experts.placement.policy import first_placement
from raytrain.accelerator import device_memory
from raytrain.config.sections import OptimConfig
from raytrain.train.memory.device import Shortage, is_out_of_memory, run_or_shortage
from raytrain.train.session import Session

GPU = torch.cuda.is_available()
DEVICES = ["cpu", *(["cuda"] if GPU else [])]
on_each_device = pytest.mark.parametrize("kind", DEVICES)
needs_gpus = pytest.mark.skipif(not GPU, reason="needs a GPU")


@pytest.mark.gpu
def test_the_machine_is_described_as_torch_sees_it() -> None:
    found = local_inventory()
    seen = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if GPU else 0)]
    assert list(found.unusable) == [] or not GPU, found.unusable
    assert len(found.devices()) == len(seen), (found.notes, [one.name for one in seen])
    for device, properties in zip(found.devices(), seen, strict=True):
        if torch.version.hip is None:
            assert device.name == properties.name and device.capability == (properties.major, properties.minor)
        assert device.memory_bytes == pytest.approx(properties.total_memory, rel=0.1)
        assert device.free_bytes is None or 0 < device.free_bytes <= device.memory_bytes


def allocate(device: str) -> Any:
    return torch.empty(2**50, dtype=torch.uint8, device=device)


@pytest.mark.gpu
@needs_gpus
def test_memory_of_the_device_that_runs_out_is_recognised() -> None:
    device = torch.device("cuda", 0)
    short = run_or_shortage(lambda: allocate("cuda"), device=device, who="rank 0")
    assert isinstance(short, Shortage) and short.free_bytes is not None
    free, total = device_memory(device)
    assert 0 < free <= total
    assert float(torch.ones(4, device=device).sum()) == 4, "the process goes on"


def first_product(answers: Any) -> None:
    """In a new process: fill the memory, then let cuBLAS create its handle, which allocates by itself."""
    device = torch.device("cuda", 0)
    torch.cuda.init()
    x, filled, size = torch.ones(64, 64, device=device), [], 2**30
    while size > 2**20:
        try:
            filled.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        y = x @ x
        torch.cuda.synchronize()
        answers.put(("worked", bool(y[0, 0] == 64), ""))
    except RuntimeError as error:
        answers.put(("failed", is_out_of_memory(error, device=device), f"{type(error).__name__}: {error}"))


@pytest.mark.gpu
@needs_gpus
def test_memory_that_a_library_finds_missing_is_recognised() -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=first_product, args=(answers,))
    process.start()
    outcome, right, text = answers.get(timeout=120)
    process.join()
    assert right, f"{outcome}: {text}"


@pytest.mark.gpu
@needs_gpus
def test_an_expert_host_without_room_drops_the_step_and_goes_on() -> None:
    device = torch.device("cuda", 0)
    placement = first_placement([2], hosts=1)
    shapes = [LayerShape(64, (256, 256), "gelu")]
    shard = ExpertShard(shapes, placement, 0, optim=OptimConfig(), dtype=torch.float32, device=device)
    for key in shard.held():
        shard.set_weights(key, {name: 0.02 * torch.randn(size) for name, size in shapes[0].weights(key[1]).items()})
    few, many = torch.randn(8, 64, device=device), torch.randn(2**20, 64, device=device)
    before = shard.forward(0, 0, few, [[4, 4]], keep=False)
    room = torch.cuda.memory_reserved(device) + 2**28  # the products of many rows need 1 GiB
    try:
        torch.cuda.set_per_process_memory_fraction(room / device_memory(device)[1], device)
        assert shard.forward(0, 0, many, [[2**19, 2**19]], keep=True) is many and shard.short is not None
        assert shard.forward(0, 1, few, [[4, 4]], keep=True) is few, "the rest of the step is not computed"
        shard.discard()
        assert torch.equal(shard.forward(0, 0, few, [[4, 4]], keep=False), before)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu
@on_each_device
@pytest.mark.parametrize(("width", "hidden"), [(16, 32), (64, 256), (1024, 4096)])
def test_the_grouped_product_equals_the_loop_or_is_not_used(kind: str, width: int, hidden: int) -> None:
    if kind == "cpu" and width > 64:
        pytest.skip("a CPU is asked with small sizes only")
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    problem = why_not(Shape(device, torch.bfloat16, width, hidden))
    print("used" if not problem else f"not used: {problem}")
    torch.manual_seed(0)
    experts = GroupedExperts(4, width, hidden).to(device, torch.bfloat16)
    x = torch.randn(96, width, device=device, dtype=torch.bfloat16)
    counts = torch.tensor([40, 0, 56, 0], device=device)
    ours, looped = experts(x, counts), experts._looped(x, [40, 0, 56, 0])
    parameters = list(experts.parameters())
    pairs = [(ours, looped)]
    pairs += zip(*(torch.autograd.grad(one.float().square().sum(), parameters) for one in (ours, looped)), strict=True)
    for one, other in pairs:
        assert (one - other).abs().max() <= 0.05 * other.abs().max()
        assert torch.isfinite(one).all()


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_a_compiled_model_trains_and_evaluates_as_the_eager_one(tiny_job: Callable[..., Session], mode: str) -> None:
    eager, compiled = (tiny_job(device="cuda", steps=12, compile=one, evaluate=True) for one in ("off", mode))
    expected, found = (Lines().of(session) for session in (eager, compiled))
    assert len(found) == len(expected) and found == pytest.approx(expected, rel=1e-2)
    assert compiled.switches.compiled is not None
    status = compiled.switches.compiled.status()
    assert all(part["achieved"] == "compiled" for part in status["parts"]), status


class Lines:
    """A reporter that keeps the losses of training and of evaluations."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def of(self, session: Session) -> list[float]:
        """The losses of a run of this session."""
        session.prepare("fp32")
        session.loop(reporter=self, should_stop=lambda: False).run(session.state)  # pyright: ignore
        assert all(map(math.isfinite, self.losses))
        return self.losses

    def metrics(self, row: dict[str, Any]) -> None:
        self.losses.append(row["loss"])

    def event(self, kind: str, **fields: Any) -> None:
        pass

    def interval(self, row: dict[str, Any], traces: dict[int, bytes]) -> None:
        pass


def gathered(rank: int, port: int, answers: Any) -> None:
    """One of two workers: seconds of a sharded model's passes, with torch's order and with one block at a time."""
    import torch.distributed as dist

    from raytrain.models.gpt import gpt
    from raytrain.train.parallel import fsdp as wrap
    from raytrain.train.parallel.collectives import Workers
    from raytrain.train.precision import policy_for

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=2, device_id=device)
    workers, seconds = Workers(), {}
    for overlap in (False, True):
        wrap.on_gpu = lambda _, at=overlap: at
        trainable = gpt(layers=12, heads=8, width=1024, context=256, vocab_size=1000)
        order = wrap.BlockOrder(workers, device=device)
        wrap.shard(trainable, device=device, policy=policy_for("bf16"), workers=workers, order=order)
        batch = {name: torch.randint(0, 1000, (8, 256), device=device) for name in ("x", "y")}
        for step in range(12):
            if step == 4:
                torch.cuda.synchronize()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
            trainable.module(batch["x"]).float().square().mean().backward()
        end.record()
        torch.cuda.synchronize()
        seconds[overlap] = begin.elapsed_time(end) / 8000
    if rank == 0:
        answers.put(seconds)
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fsdp_overlap_hides_a_part_of_the_gathering() -> None:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=gathered, args=(rank, port, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    seconds = answers.get(timeout=180)
    for process in processes:
        process.join()
    print(f"one block at a time {seconds[False]:.4f} s, overlapped {seconds[True]:.4f} s")
    assert seconds[True] <= 1.02 * seconds[False]
