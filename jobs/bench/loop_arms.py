"""The options and the two arms of bench `loop`: the same model on the same text, as a raytrain job and as a script.

An observer (`telemetry.observers`) holds our run between blocks: rank 0 waits for the bench, and the other workers wait
for its vote. The time of a block therefore includes the steps, the logged rows, the votes and all other work of a run.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count, Text
from cluster.devices.inventory import local_inventory
from jobs.bench.harness.inputs import gpt_model, job_of, write_text
from jobs.bench.harness.measuring import alternate
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import ArmProcesses, ArmServer, connect, receive
from raytrain.errors import InputError, RunError

LOG_EVERY = 10
#: Seconds within which our run must end after its last block.
END_TIMEOUT_S = 120.0


class LoopOptions(BenchOptions):
    """A steady training step against that of a plain PyTorch loop, and of plain DDP."""

    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 1, "heads": 2, "width": 16, "context": 16, "batch": 4, "blocks": 3, "block_steps": 10,
    }  # fmt: skip

    workers: list[Count] = Field([1, 2], description="world sizes, one after the other")
    layers: Count = Field(4, description="of the GPT")
    heads: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    context: Count = Field(64, description="tokens of a window")
    batch: Count = Field(12, description="rows of a step, over all workers")
    text: Text | None = Field(None, description="a text file; null generates one")
    block_steps: Count = Field(40, description="steps of one block, a multiple of 10 (the log interval)")
    dropped: Count = Field(2, description="warm-up blocks")


def check_block_steps(options: LoopOptions) -> None:
    """Refuse blocks that do not end with a logged row."""
    if options.block_steps % LOG_EVERY:
        raise InputError("block_steps", got=str(options.block_steps), expected=f"a multiple of {LOG_EVERY}")


def make_text(options: LoopOptions, folder: Path) -> Path:
    """The training text of both arms."""
    return write_text(
        folder, batch=options.batch, context=options.context, steps=total_steps(options), seed=options.seed,
        source=options.text,
    )  # fmt: skip


def threads_of(options: LoopOptions, world_size: int) -> int:
    """Threads of one process, the same for both arms: the cores divided by the workers."""
    return options.threads if isinstance(options.threads, int) else max(1, local_inventory().cpus // world_size)


def total_steps(options: LoopOptions) -> int:
    """Steps of each arm in all blocks."""
    return (options.dropped + options.blocks) * options.block_steps


def loop_job(options: LoopOptions, *, world_size: int, text: Path, save_dir: Path) -> dict[str, Any]:
    """The job of our arm; it saves one checkpoint, at its end (bench `checkpoint` measures checkpoints)."""
    steps = total_steps(options)
    return job_of(
        options, gpt_model(options), text, name=f"loop-{world_size}", workers=world_size,
        threads=threads_of(options, world_size), precision={"dtype": "fp32"},
        loop={"max_steps": steps, "global_batch_size": options.batch, "log_every": LOG_EVERY},
        save={"every": steps + 1, "dir": str(save_dir)},
    )  # fmt: skip


def start_script(
    server: ArmServer, arm: str, target: str, options: LoopOptions, *, world_size: int, text: Path,
    cwd: Path | None = None,
) -> ArmProcesses:  # fmt: skip
    """Start `target` as an arm: one process, or `world_size` processes under torchrun."""
    keys = ("layers", "heads", "width", "context", "batch", "seed")
    settings = {key: getattr(options, key) for key in keys}
    threads = threads_of(options, world_size)
    settings |= {"text": str(text), "threads": threads, "max_steps": total_steps(options), "arm": arm}
    launcher: list[str] = []
    if world_size > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--master-addr=127.0.0.1",
                    f"--master-port={port}"]  # fmt: skip
    return ArmProcesses(
        server, arm, target, settings, connecting=world_size, launcher=launcher,
        environment={"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}, cwd=cwd,
    )  # fmt: skip


class TrainingBlocks:
    """Arms that train so many steps on request, in alternating blocks.

    Attributes:
        losses, cpu_s: of each arm, of all blocks so far: the logged losses, and the CPU seconds of a step.
    """

    def __init__(self, asks: Mapping[str, Callable[..., dict[str, Any]]], steps: int) -> None:
        self.losses: dict[str, list[float]] = {name: [] for name in asks}
        self.cpu_s: dict[str, list[float]] = {name: [] for name in asks}
        self._asks, self._steps = asks, steps

    def run(self, blocks: int) -> dict[str, list[float]]:
        """Run blocks of each arm in turn; returns the seconds per step of each."""
        return alternate({name: partial(self._block, name) for name in self._asks}, blocks=blocks, dropped=0)

    def _block(self, name: str) -> float:
        answer = self._asks[name](steps=self._steps)
        self.losses[name] += answer["losses"]
        self.cpu_s[name].append(answer["cpu_s"] / self._steps)
        return answer["seconds"] / self._steps


class OurRun:
    """Our arm: a `train` call whose driver is a thread of the bench, on a running Ray.

    Args:
        observer: a kind of `BlockObserver` of its own for each of several runs at the same time.
    """

    def __init__(self, server: ArmServer, job: dict[str, Any], *, observer: type[BlockObserver] | None = None) -> None:
        kind = observer or BlockObserver
        self._server, self.arm = server, kind.ARM
        self._job = {**job, "telemetry": {"observers": [f"{kind.__module__}:{kind.__name__}"]}}
        self._thread = threading.Thread(target=self._train, daemon=True, name="bench-train")
        self.error = ""

    def _train(self) -> None:
        from jobs.train import train

        try:
            train(self._job, quiet=True)
        except Exception as error:  # reported by `join`, or with the error of the arm
            self.error = f"{type(error).__name__}: {error}"

    def start(self) -> None:
        """Start the run and wait until it is about to take its first step.

        Raises:
            RunError: the run ended first.
        """
        self._thread.start()
        self._server.await_arm(self.arm, processes=1, alive=self._thread.is_alive)

    @contextlib.contextmanager
    def beside(self, *others: ArmProcesses) -> Iterator[None]:
        """Starts this run while the other arms start; at the end lets both go on and waits for the end of this run.

        Raises:
            RunError: an arm died, with what each of them said last.
        """
        try:
            for other in others:
                other.await_ready()
            self.start()
            yield
            self.dismiss()
            self._join(END_TIMEOUT_S)
        except RunError as error:
            logs = "; ".join(f"{other.arm}: {other.log_tail()}" for other in others)
            raise RunError(f"{error}; {self.arm}: {self.error or 'running'}; {logs}") from error
        finally:
            self.dismiss()
            for other in others:
                other.close()

    def ask_slowest(self, *, steps: int) -> dict[str, Any]:
        """Train `steps` steps; returns the answer of rank 0, like `ArmProcesses.ask_slowest`."""
        return self._server.ask_slowest(self.arm, steps=steps)

    def dismiss(self) -> None:
        """Tell the run that there are no more blocks; it continues to its end without waiting."""
        self._server.dismiss(self.arm)

    def _join(self, timeout: float) -> None:
        """Wait for the end of the run.

        Raises:
            RunError: it failed, or did not end in time.
        """
        self._thread.join(timeout)
        if self._thread.is_alive() or self.error:
            raise RunError(f"our arm did not end well: {self.error or f'still running after {timeout:g} s'}")


class BlockObserver:
    """The observer in rank 0 of our run: waits for the bench before each block and sends the answer after it."""

    ARM: ClassVar[str] = "ours"

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._last_step = 0
        self._began = self._cpu = 0.0
        self._losses: list[float] = []

    def event(self, row: dict[str, Any]) -> None:
        """Connect at the event of the attempt, right before the first step, where the start-up ends."""
        if row["kind"] == "attempt" and self._connection is None:
            self._connection = connect(arm=self.ARM, rank=0)
            self._wait()

    def metrics(self, row: dict[str, Any]) -> None:
        """Record the loss of a logged row; at the end of a block, send its seconds and wait for the next block."""
        if self._connection is None:
            return
        ended, cpu = time.perf_counter(), time.process_time()
        self._losses.append(row["loss"])
        if row["step"] >= self._last_step:
            self._connection.send({"seconds": ended - self._began, "cpu_s": cpu - self._cpu, "losses": self._losses})
            self._losses = []
            self._wait()

    def _wait(self) -> None:
        assert self._connection is not None
        steps = receive(self._connection)["steps"]
        if steps == 0:
            self.close()
        self._last_step += steps
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def close(self) -> None:
        """Disconnect; the run continues to its end without waiting."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
