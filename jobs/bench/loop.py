"""Bench `loop`: a `train` run in Ray Train workers against a plain PyTorch loop, and against DDP under torchrun.

Both have processes of their own, which for our run are a command and Ray's workers; blocks alternate, and the waiting
arm uses no CPU. An observer (`telemetry.observers`) holds our run between blocks: rank 0 waits for the bench, and the
other workers wait for its vote. The time of a block therefore includes the steps, the logged rows, the votes and all
other work of a run. Bench `startup` measures the start. Benches `peers` and `scaling` have the same arms.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cluster.config import Count
from cluster.devices.inventory import local_inventory
from jobs.bench.harness.measuring import BenchMeasurement, Goal, alternate, equal_series
from jobs.bench.harness.options import TextOptions, key
from jobs.bench.harness.processes import ArmProcesses, Arms, connect, receive, serve_blocks
from jobs.bench.harness.sessions import PlainLoop, gpt_model, job_of, write_text
from raytrain.data.sources.text import text_source
from raytrain.errors import InputError
from raytrain.models.gpt import gpt

LOG_EVERY = 10
#: Steady-state steps per second of our run over those of the plain loop, and of several workers over those of DDP.
GOAL, GOAL_DDP = Goal(at_least=0.98), Goal(at_least=1.0)
#: Two workers sum in a different order than DDP's buckets: equal within fp32 rounding over the first blocks.
DDP_TOLERANCE = 1e-4


class StepOptions(TextOptions):
    """Options of a bench whose arms train the same steps on the same text."""

    block_steps: Count = key(40, "steps of one block, a multiple of 10 (the log interval)", quick=10)
    dropped: Count = key(2, "warm-up blocks")

    @property
    def total_steps(self) -> int:
        return (self.dropped + self.blocks) * self.block_steps

    def threads_of(self, world_size: int) -> int:
        """Threads of one process, the same for both arms: the cores divided by the workers."""
        return self.threads if isinstance(self.threads, int) else max(1, local_inventory().cpus // world_size)


class LoopOptions(StepOptions):
    workers: list[Count] = key([1, 2], "world sizes, one after the other")


def run(options: LoopOptions, found: BenchMeasurement) -> None:
    check_blocks(options, workers=options.workers)
    found.block = f"seconds per step, the mean of {options.block_steps} steps"
    for world_size in options.workers:
        _measure(options, found, world_size)
        if not found.passed:
            break


def _measure(options: LoopOptions, found: BenchMeasurement, world_size: int) -> None:
    """Check the gate, then run alternating blocks of our run and of the plain loop with both ways to clip."""
    label, peer = f"{world_size} worker(s)", "plain loop" if world_size == 1 else "plain DDP"
    threads = options.threads_of(world_size)
    found.say(f"{label}, {threads} thread(s) each: starting both arms")
    with Arms() as arms:
        text = write_text(arms.folder, options, steps=options.total_steps)
        plain = start_script(arms, "plain", "jobs.bench.loop:plain_loop", options, world_size=world_size, text=text)
        ours = start_run(arms, "ours", loop_job(options, world_size=world_size, text=text, folder=arms.folder))
        asks = {
            peer: partial(plain.ask, clip="rows"),
            f"{peer}, torch's clip": partial(plain.ask, clip="torch"),
            "ours": ours.ask,
        }
        blocks = TrainingBlocks(arms, asks, options.block_steps)
        blocks.run(options.dropped)
        gate = f"losses of {label} equal those of the {peer}"
        tolerance = 0.0 if world_size == 1 else DDP_TOLERANCE
        if not found.gate(equal_series(gate, blocks.losses["ours"], blocks.losses[peer], relative=tolerance)):
            return
        found.say(f"{label}: {options.blocks} blocks of {len(asks)} arms")
        times = blocks.run(options.blocks)
    if world_size == 1:
        found.gate(equal_series(f"{gate}, whole run", blocks.losses["ours"], blocks.losses[peer]))
    found.arms |= {f"{name}, {label}": values for name, values in times.items()}
    for name in (name for name in asks if name != "ours"):
        goal = GOAL if world_size == 1 else GOAL_DDP
        found.compare(times, of=name, to="ours", name=f"{name} / ours, {label}", goal=goal)
    found.values[label] = {
        "threads": threads,
        "samples_per_s": {name: options.batch / statistics.median(times[name]) for name in asks},
        "losses": blocks.losses,
    }


# ---------------------------------------------------------------- what the arms share


def check_blocks(options: StepOptions, *, workers: list[int]) -> None:
    """Refuse blocks that do not end with a logged row, and a batch that is not divisible by the workers."""
    if options.block_steps % LOG_EVERY:
        raise InputError("block_steps", got=str(options.block_steps), expected=f"a multiple of {LOG_EVERY}")
    for world_size in workers:
        if options.batch % world_size:
            raise InputError("batch", got=f"{options.batch} for {world_size} workers", expected="a multiple of workers")


def loop_job(options: StepOptions, *, world_size: int, text: Path, folder: Path) -> dict[str, Any]:
    """The job of our arm; it saves one checkpoint, at its end (bench `checkpoint` measures checkpoints)."""
    steps = options.total_steps
    return job_of(
        options, gpt_model(options), text, name=f"loop-{world_size}", workers=world_size,
        threads=options.threads_of(world_size), precision={"dtype": "fp32"},
        loop={"max_steps": steps, "global_batch_size": options.batch, "log_every": LOG_EVERY},
        save={"every": steps + 1, "dir": str(folder / f"runs-{world_size}")},
    )  # fmt: skip


def start_run(arms: Arms, arm: str, job: dict[str, Any]) -> ArmProcesses:
    """Start an arm that is a `train` run: a process with Ray, whose rank 0 connects."""
    observed = {**job, "telemetry": {"observers": ["jobs.bench.loop:BlockObserver"]}}
    return ArmProcesses(arms, arm, "jobs.bench.loop:train_run", observed)


def train_run(job: dict[str, Any], _rank: int) -> None:
    from jobs.train import train  # here and not above: a process of the plain loop does without

    train(job, quiet=True)


def start_script(
    arms: Arms, arm: str, target: str, options: StepOptions, *, world_size: int, text: Path
) -> ArmProcesses:
    """Start an arm that is a script without raytrain: in one process, or in `world_size` processes under torchrun."""
    threads = options.threads_of(world_size)
    settings = {**options.sizes, "batch": options.batch, "seed": options.seed, "text": str(text), "threads": threads,
                "max_steps": options.total_steps}  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return ArmProcesses(
        arms, arm, target, settings, connecting=world_size,
        launcher=[*torchrun, f"--nproc-per-node={world_size}"] if world_size > 1 else [],
        environment={"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip


class TrainingBlocks:
    """Arms that train so many steps on request, in alternating blocks, once all are ready; `losses` are the logged ones
    of each, of all blocks so far."""

    def __init__(self, arms: Arms, asks: Mapping[str, Callable[..., dict[str, Any]]], steps: int) -> None:
        self.losses: dict[str, list[float]] = {name: [] for name in asks}
        self._asks, self._steps = asks, steps
        arms.await_ready()

    def run(self, blocks: int) -> dict[str, list[float]]:
        """Run blocks of each arm in turn; returns the seconds per step of each."""
        return alternate({name: partial(self._block, name) for name in self._asks}, blocks=blocks, dropped=0)

    def _block(self, name: str) -> float:
        answer = self._asks[name](steps=self._steps)
        self.losses[name] += answer["losses"]
        return answer["seconds"] / self._steps


class BlockObserver:
    """The observer in rank 0 of our run: waits for the bench before each block and sends the answer after it."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._last_step = 0

    @property
    def over(self) -> bool:
        return self._connection is not None and self._connection.closed

    def event(self, row: dict[str, Any]) -> None:
        """Begin at the event of the first attempt, right before the first step."""
        if row["kind"] == "attempt" and self._connection is None:
            self.begin()

    def begin(self) -> None:
        self._connection = connect()
        self._wait(self._connection)

    def metrics(self, row: dict[str, Any]) -> None:
        """Record the loss of a logged row; at the end of a block, send its seconds and wait for the next block."""
        ended = time.perf_counter()
        if self._connection is None or self.over:
            return
        self._losses.append(row["loss"])
        if row["step"] >= self._last_step:
            self._connection.send({"seconds": ended - self._began, "losses": self._losses})
            self._wait(self._connection)

    def _wait(self, connection: Connection) -> None:
        steps = receive(connection)["steps"]
        if steps == 0:
            connection.close()  # the run goes on to its end without waiting
        self._last_step += steps
        self._losses: list[float] = []
        self._began = time.perf_counter()


# ---------------------------------------------------------------- the plain loop


def text_batches(settings: dict[str, Any], *, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of the text in the order of a job's epochs; this rank's rows of each step."""
    text, context, batch = Path(settings["text"]).read_bytes(), settings["context"], settings["batch"]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    windows = tokens.unfold(0, context, 1)
    orders = text_source(text, context=context, eval_fraction=0.0).train  # only for its order of rows
    each, epoch = batch // world_size, 0
    while True:
        order = torch.from_numpy(orders.order(settings["seed"], epoch))
        for begin in range(0, len(order) - batch + 1, batch):
            starts = order[begin + rank * each : begin + (rank + 1) * each]
            yield windows[starts].long(), windows[starts + 1].long()
        epoch += 1


def language_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(input_ids=batch[0], labels=batch[1])["loss"]


def gpt_loop(settings: dict[str, Any], *, clip: str, rank: int, world_size: int) -> PlainLoop:
    """The plain loop on the bench's GPT, with the initial weights that a job with the same seed has."""
    torch.manual_seed(settings["seed"])
    sizes = {name: settings[name] for name in ("layers", "heads", "width", "context")}
    module = gpt(**sizes, vocab_size=256).module
    batches = text_batches(settings, rank=rank, world_size=world_size)
    return PlainLoop(module, language_loss, batches, max_steps=settings["max_steps"], clip=clip, ddp=world_size > 1)


def plain_loop(settings: dict[str, Any], rank: int) -> None:
    """A process of the plain loop: `{"steps": n, "clip": ...}` trains n steps of the loop with that clip."""
    torch.set_num_threads(settings["threads"])
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    loops = {clip: gpt_loop(settings, clip=clip, rank=rank, world_size=world_size) for clip in ("rows", "torch")}

    def run_block(request: dict[str, Any]) -> dict[str, Any]:
        if world_size > 1:
            dist.barrier()
        began = time.perf_counter()
        losses = loops[request["clip"]].run(request["steps"])
        return {"seconds": time.perf_counter() - began, "losses": losses}

    serve_blocks(run_block)
    if world_size > 1:
        dist.destroy_process_group()
