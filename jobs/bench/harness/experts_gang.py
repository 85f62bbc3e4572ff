"""The bench's side of its processes: a gang of workers and hosts, or the experts in one process, as arms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from jobs.bench.experts.experts_layers import Case
from jobs.bench.harness.lines import Arms, await_end
from raytrain.errors import RunError


@dataclass(frozen=True)
class GangLayout:
    """Where the experts live: in `hosts` hosts of `workers` workers, or (hosts 0) inside the workers; no workers is one
    process without any exchange."""

    workers: int
    hosts: int = 0

    @property
    def size(self) -> int:
        """Processes, of one thread each (but for the lone one)."""
        return max(1, self.workers + self.hosts)

    def __str__(self) -> str:
        if not self.workers:
            return "in process"
        return f"{self.workers} + {self.hosts}" if self.hosts else f"{self.workers} colocated"


class Gang:
    """The processes of one layout, waiting for orders.

    Args:
        sizes: widths, num_experts, top_k and seed of the layers.
        folder: for settings, meters, results and logs.
        name: where there are several of one layout.
    """

    def __init__(self, arms: Arms, layout: GangLayout, sizes: dict[str, Any], folder: Path, *, name: str = "") -> None:
        self.arms, self.layout, self.folder = arms, layout, folder
        self.name = name or str(layout).replace(" ", "")
        self.case: Case | None = None
        settings = {
            **sizes, "arm": self.name, "workers": layout.workers, "hosts": layout.hosts,
            "store": str(folder / f"{self.name}.store"), "meters": str(folder / f"{self.name}.meter"),
        }  # fmt: skip
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(settings))
        self._log = folder / f"{self.name}.log"
        with self._log.open("ab") as log:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, "-m", "jobs.bench.experts.experts_member", str(path), str(rank)],
                    stdout=log,
                    stderr=log,
                )
                for rank in range(layout.size)
            ]

    def await_ready(self) -> None:
        """Until all are there.

        Raises:
            RunError: with the end of their log, where one died.
        """
        try:
            self.arms.await_arm(self.name, processes=max(1, self.layout.workers), alive=self.is_alive)
        except RunError as error:
            raise RunError(f"{error}; its log ends with:\n{self._log.read_text(errors='replace')[-2000:]}") from error

    def is_alive(self) -> bool:
        """Whether none has ended."""
        return all(process.poll() is None for process in self.processes)

    def order(self, case: Case, *, steps: int, **more: Any) -> dict[str, Any]:
        """A block of so many passes of a case; see `obey`."""
        message: dict[str, Any] = {"steps": steps, **more}
        if case != self.case:
            message["prepare"] = asdict(case)
            self.case = case
        return self.obey(message)

    def obey(self, message: dict[str, Any]) -> dict[str, Any]:
        """A block: the seconds of the slowest worker, and the CPU seconds of all members; where there is an exchange
        also the seconds in it (`transport_s`), and those of the slowest holder of experts (`computing_s`).

        Raises:
            RunError: a process died.
        """
        before = self._meters()
        try:
            answers = self.arms.ask(self.name, message)
        except RunError as error:
            raise RunError(f"{self.name}: {error}; log:\n{self._log.read_text(errors='replace')[-2000:]}") from error
        after = self._meters()
        last = max(answers, key=lambda answer: answer["seconds"])
        computed, used = (after - before).T if len(after) else (np.zeros(1), np.zeros(1))
        hosts = slice(self.layout.workers, None)
        return {
            **last,
            "cpu_s": sum(answer["cpu_s"] for answer in answers) + float(used[hosts].sum() if self.layout.hosts else 0),
            "computing_s": float(computed.max()),
        }

    def results(self, case: Case, **more: Any) -> list[dict[str, Tensor]]:
        """What one pass made, of each worker."""
        stem = str(self.folder / f"{self.name}-results")
        self.order(case, steps=1, results=stem, **more)
        made = [load_file(f"{stem}-{rank}.safetensors") for rank in range(max(1, self.layout.workers))]
        for rank in range(len(made)):
            os.unlink(f"{stem}-{rank}.safetensors")
        return made

    def _meters(self) -> np.ndarray:
        paths = [self.folder / f"{self.name}.meter-{rank}" for rank in range(self.layout.size)]
        found = [np.fromfile(path) if path.exists() else np.zeros(2) for path in paths if self.layout.workers]
        return np.asarray(found)

    def close(self, *, at_once: bool) -> None:
        """Let them go; whoever does not is killed."""
        self.arms.dismiss(self.name)
        for process in self.processes:
            if at_once:
                process.kill()
            await_end(process)
