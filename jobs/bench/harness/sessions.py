"""A session of raytrain in this process, without Ray, trained block by block as an arm of a bench."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from jobs.bench.harness.measuring import alternate
from jobs.driver.session import session_of
from raytrain.autotune.startup import measure_precision
from raytrain.execution.reporter import SilentReporter
from raytrain.plan.choice import Deferred


class TrainingArm(Protocol):
    """An arm that trains in this process."""

    def run(self, steps: int) -> float:
        """Train `steps` more steps; returns the seconds."""
        ...


class SessionArm:
    """A prepared session whose loop runs a block of steps at a time.

    Args:
        connection: to the processes that hold the experts, see `session_of`.
    """

    def __init__(
        self, job: Mapping[str, Any], *, precision: str, reporter: LossLog | None = None, connection: Any = None
    ) -> None:
        self.session = session_of(job, connection=connection)
        self.session.prepare(precision)
        self.reporter = reporter or LossLog()
        self.loop = self.session.loop(reporter=self.reporter, should_stop=_never)

    @property
    def losses(self) -> list[float]:
        """The losses of all logged steps."""
        return self.reporter.losses

    def run(self, steps: int) -> float:
        """Train `steps` more steps; returns the seconds. The last step is logged, which synchronizes the device."""
        self.loop.limits = replace(self.loop.limits, max_steps=self.session.state.step + steps)
        began = time.perf_counter()
        self.loop.run(self.session.state)
        return time.perf_counter() - began

    def run_block(self, steps: int) -> dict[str, Any]:
        """`run`, with the answer to the bench: {"seconds", "cpu_s" of this process, "losses" of these steps}."""
        before, cpu = len(self.losses), time.process_time()
        seconds = self.run(steps)
        return {"seconds": seconds, "cpu_s": time.process_time() - cpu, "losses": self.losses[before:]}


def alternate_steps(arms: Mapping[str, TrainingArm], *, steps: int, blocks: int) -> dict[str, list[float]]:
    """Train blocks of `steps` steps of each arm in turn; returns the seconds per step, see `alternate`."""
    return alternate({name: lambda arm=arm: arm.run(steps) / steps for name, arm in arms.items()}, blocks=blocks)


@contextlib.contextmanager
def restored_threads(threads: int | None = None) -> Iterator[None]:
    """Restores torch's number of threads on exit; sets it to `threads` inside, if given."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def chosen_precision(job: Mapping[str, Any]) -> tuple[str, str, list[dict[str, Any]]]:
    """The choice of `precision.dtype: auto` for this job on this machine: (value, reason, trials)."""
    session = session_of({**job, "precision": {"dtype": "auto"}})
    precision = session.job.plan.precision
    if not isinstance(precision, Deferred):
        return str(precision.value), precision.reason, []
    session.prepare("fp32")
    chosen, trials = measure_precision(session, list(precision.bounds))
    return str(chosen.value), chosen.reason, trials


def _never() -> bool:
    return False


class LossLog(SilentReporter):
    """A reporter that records the loss and the peak memory of each logged step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.peaks: list[int] = []

    def metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] == "train":
            self.losses.append(row["loss"])
            self.peaks.append(row["peak_memory_bytes"])


class SavedForBackward:
    """Counts the bytes that autograd saves for backward, without parameters, each storage once."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._saved: dict[int, torch.UntypedStorage] = {}  # held until counted, so that no address is reused
        self.bytes = 0

    def during(self, forward: Callable[[], Any]) -> int:
        """Run `forward`, keep its result alive while counting, and return the bytes."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            result = forward()
        self.bytes = sum(storage.nbytes() for storage in self._saved.values())
        del result
        self._saved.clear()
        return self.bytes

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._saved[storage.data_ptr()] = storage
        return tensor
