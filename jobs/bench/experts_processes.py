"""The arms of bench `experts`: workers and hosts in separate processes, or all experts in one process. Torch-free."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.bench.harness.processes import ArmProcesses, ArmServer

if TYPE_CHECKING:
    from torch import Tensor

    from jobs.bench.experts_layers import Case


@dataclass(frozen=True)
class ExpertsLayout:
    """Where the experts are: on `hosts` hosts of `workers` workers, or with 0 hosts in the workers. 0 workers means one
    process without any exchange."""

    workers: int
    hosts: int = 0

    @property
    def processes(self) -> int:
        """The number of processes; each has one thread, except a single process."""
        return max(1, self.workers + self.hosts)

    def __str__(self) -> str:
        if not self.workers:
            return "in process"
        return f"{self.workers} + {self.hosts}" if self.hosts else f"{self.workers} colocated"


class ExpertsArm(ArmProcesses):
    """The processes of one layout.

    Args:
        sizes: widths, num_experts, top_k and seed of the layers.
        name: required if several arms have the same layout.
    """

    def __init__(self, server: ArmServer, layout: ExpertsLayout, sizes: dict[str, Any], *, name: str = "") -> None:
        self.layout = layout
        self._case: Case | None = None
        name = name or str(layout).replace(" ", "")
        self._files = server.folder / name
        settings = {
            **sizes, "arm": name, "workers": layout.workers, "hosts": layout.hosts, "store": f"{self._files}.store",
            "meters": f"{self._files}.meter",
        }  # fmt: skip
        super().__init__(
            server, name, "jobs.bench.experts_member:main", settings, processes=layout.processes,
            connecting=max(1, layout.workers),
        )  # fmt: skip

    def run_case(self, case: Case, *, steps: int, **more: Any) -> dict[str, Any]:
        """Run a block of `steps` passes of a case; see `run_block`."""
        if case != self._case:
            more["prepare"] = asdict(case)
            self._case = case
        return self.run_block(steps=steps, **more)

    def run_block(self, *, steps: int, **more: Any) -> dict[str, Any]:
        """Run a block; returns the answer of the slowest worker, with the CPU seconds of all processes, and with an
        exchange also its seconds (`transport_s`) and the computation of the slowest holder of experts (`computing_s`).

        Raises:
            RunError: a process died.
        """
        before = self._read_meters()
        answers = self.ask(steps=steps, **more)
        after = self._read_meters()
        slowest = max(answers, key=lambda answer: answer["seconds"])
        computed, used = (after - before).T if len(after) else (np.zeros(1), np.zeros(1))
        hosts = slice(self.layout.workers, None)
        return {
            **slowest,
            "cpu_s": sum(answer["cpu_s"] for answer in answers) + float(used[hosts].sum() if self.layout.hosts else 0),
            "computing_s": float(computed.max()),
        }

    def results(self, case: Case, **more: Any) -> list[dict[str, Tensor]]:
        """The output and gradients of one pass in each worker."""
        from safetensors.torch import load_file

        stem = f"{self._files}-results"
        self.run_case(case, steps=1, results=stem, **more)
        results = [load_file(f"{stem}-{rank}.safetensors") for rank in range(max(1, self.layout.workers))]
        for rank in range(len(results)):
            os.unlink(f"{stem}-{rank}.safetensors")
        return results

    def _read_meters(self) -> np.ndarray:
        paths = [f"{self._files}.meter-{rank}" for rank in range(self.layout.processes)]
        read = [np.fromfile(path) if os.path.exists(path) else np.zeros(2) for path in paths if self.layout.workers]
        return np.asarray(read)
