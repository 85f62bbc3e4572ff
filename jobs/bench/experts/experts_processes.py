"""The arms of bench `experts`: workers and hosts in processes of their own, or all experts in one process."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from jobs.bench.experts.experts import ExpertsLayout
from jobs.bench.experts.experts_layers import Case
from jobs.bench.harness.processes import ArmProcesses, ArmServer


class ExpertsArm:
    """The processes of one layout.

    Args:
        sizes: widths, num_experts, top_k and seed of the layers.
        name: needed where several arms have one layout.
    """

    def __init__(self, server: ArmServer, layout: ExpertsLayout, sizes: dict[str, Any], *, name: str = "") -> None:
        self.layout, self._folder = layout, server.folder
        self.name = name or str(layout).replace(" ", "")
        self._case: Case | None = None
        settings = {
            **sizes, "arm": self.name, "workers": layout.workers, "hosts": layout.hosts,
            "store": str(server.folder / f"{self.name}.store"), "meters": str(server.folder / f"{self.name}.meter"),
        }  # fmt: skip
        self._processes = ArmProcesses(
            server, self.name, "jobs.bench.experts.experts_member", settings, processes=layout.processes,
            connecting=max(1, layout.workers),
        )  # fmt: skip
        self.await_ready, self.close = self._processes.await_ready, self._processes.close

    def run_case(self, case: Case, *, steps: int, **more: Any) -> dict[str, Any]:
        """A block of `steps` passes of a case; see `run_block`."""
        if case != self._case:
            more["prepare"] = asdict(case)
            self._case = case
        return self.run_block(steps=steps, **more)

    def run_block(self, *, steps: int, **more: Any) -> dict[str, Any]:
        """A block: the answer of the slowest worker, with the CPU seconds of all processes; where there is an exchange
        also the seconds in it (`transport_s`), and those of the slowest holder of experts (`computing_s`).

        Raises:
            RunError: a process died.
        """
        before = self._read_meters()
        answers = self._processes.ask(steps=steps, **more)
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
        """The tensors that one pass makes in each worker."""
        stem = str(self._folder / f"{self.name}-results")
        self.run_case(case, steps=1, results=stem, **more)
        made = [load_file(f"{stem}-{rank}.safetensors") for rank in range(max(1, self.layout.workers))]
        for rank in range(len(made)):
            os.unlink(f"{stem}-{rank}.safetensors")
        return made

    def _read_meters(self) -> np.ndarray:
        paths = [self._folder / f"{self.name}.meter-{rank}" for rank in range(self.layout.processes)]
        read = [np.fromfile(path) if path.exists() else np.zeros(2) for path in paths if self.layout.workers]
        return np.asarray(read)
