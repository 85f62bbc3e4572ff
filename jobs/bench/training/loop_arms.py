"""The two arms of bench `loop`: the same model on the same text, as a job of ours and as a plain script."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cluster.devices.inventory import local_inventory
from jobs.bench.harness.options import LoopOptions
from raytrain.errors import InputError, RunError

LOG_EVERY = 10


@contextlib.contextmanager
def borrowed_environment() -> Iterator[None]:
    """What a bench sets for its processes is taken back at the end."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def make_text(options: LoopOptions, folder: Path) -> Path:
    """The text as a file whose windows fill every step of an epoch: a plain loop knows no shorter last batch."""
    if options.text:
        text = Path(options.text).read_bytes()
    else:
        draw = np.random.default_rng(options.seed)
        words = [bytes(draw.integers(97, 123, size=draw.integers(2, 9)).astype(np.uint8)) for _ in range(400)]
        rows = (options.dropped + options.blocks) * options.block_steps * options.batch
        tokens = min(rows * options.context, 4_000_000) + 10_000
        text = b" ".join(words[i] for i in draw.integers(len(words), size=tokens // 3))[:tokens]
    steps = (len(text) // options.context - 1) // options.batch
    if not steps:
        raise InputError("text", seen=f"{len(text)} bytes", expected="at least one batch of windows")
    path = folder / "text.txt"
    path.write_bytes(text[: options.context * (steps * options.batch + 1)])
    return path


def threads_of(options: LoopOptions, world_size: int) -> int:
    """Threads of one process, the same for both arms: the cores shared among the workers."""
    return options.threads if isinstance(options.threads, int) else max(1, local_inventory().cpus // world_size)


def total_steps(options: LoopOptions) -> int:
    """Steps of each arm from the first to the last block."""
    return (options.dropped + options.blocks) * options.block_steps


def job_of(options: LoopOptions, *, world_size: int, text: Path, save_dir: Path) -> dict[str, Any]:
    """The job of our arm, as anybody would write it; a checkpoint at its end only (bench `checkpoint` has those)."""
    sizes = {name: getattr(options, name) for name in ("layers", "heads", "width", "context")}
    steps = total_steps(options)
    return {
        "name": f"bench-loop-{world_size}",
        "seed": options.seed,
        "model": {"builder": "raytrain.models.gpt:gpt", **sizes},
        "data": {"source": "text", "path": str(text), "eval_fraction": 0.0},
        "precision": {"dtype": "fp32"},
        "loop": {"max_steps": steps, "global_batch_size": options.batch, "log_every": LOG_EVERY},
        "save": {"every": steps + 1, "dir": str(save_dir)},
        "scale": {"workers": world_size, "mode": "cpu", "threads": threads_of(options, world_size)},
    }


def start_plain(options: LoopOptions, *, world_size: int, text: Path, folder: Path) -> subprocess.Popen[bytes]:
    """The plain loop in a process of its own, or in `world_size` of them under torchrun."""
    keys = ("layers", "heads", "width", "context", "batch", "seed")
    settings = {name: getattr(options, name) for name in keys}
    settings |= {"text": str(text), "threads": threads_of(options, world_size), "max_steps": total_steps(options)}
    path = folder / f"plain-{world_size}.json"
    path.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "jobs.bench.harness.plain", str(path)]
    if world_size > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--master-addr=127.0.0.1"]
        command = [command[0], *torchrun, f"--master-port={port}", *command[1:]]
    own = {"OMP_NUM_THREADS": str(settings["threads"]), "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / f"plain-{world_size}.log").open("ab") as log:
        return subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log)


class OurRun:
    """One `train` in a thread of the bench: the driver of our arm, in a Ray that is up already."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = {**job, "telemetry": {"observers": ["jobs.bench.harness.pace:PaceObserver"]}}
        self._thread = threading.Thread(target=self._train, daemon=True, name="bench-train")
        self.error = ""

    def _train(self) -> None:
        from jobs.train import train

        try:
            train(self._job, quiet=True)
        except Exception as error:  # told to whoever waits for this arm
            self.error = f"{type(error).__name__}: {error}"

    def start(self) -> None:
        """Begin; the observer calls when the first step is due."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the run still goes on."""
        return self._thread.is_alive()

    def join(self, timeout: float) -> None:
        """Wait for the end of the run.

        Raises:
            RunError: it failed, or does not end.
        """
        self._thread.join(timeout)
        if self._thread.is_alive() or self.error:
            raise RunError(f"our arm did not end well: {self.error or f'still running after {timeout:g} s'}")
