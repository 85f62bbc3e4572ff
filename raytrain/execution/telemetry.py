"""Samples a node from a thread, and writes, publishes and judges the rows.

One process on each node: the worker whose local rank is 0, or an expert host where no worker is. The thread reads files
of the kernel and NVML, a few milliseconds per sample, and never calls torch; the training thread takes no part.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cluster.telemetry.sampler import NodeSampler, RayGauges, node_name
from cluster.telemetry.warnings import MemoryWarning, MemoryWatch
from raytrain.errors import RunError
from raytrain.execution.driver_channel import ANSWER_S
from raytrain.runs.folder import RunFolder

#: The first sample comes this soon, so that a short run has one; utilisation needs some time to count over.
FIRST_AFTER_S = 1.0


class TelemetryThread:
    """Takes a sample every `every` seconds until `close`: in t seconds t / `every` of them, one more or less.

    A sample that takes long delays none of the later ones; those that it leaves no time for are left out.

    Rows go to telemetry/<node>.jsonl of the run folder and to `gauges`, where Ray runs. Called in the thread are `warn`
    with each warning, repeated ones included, and `tags`, which returns fields of the next row, such as the step, or
    None where no sample is due.
    """

    def __init__(
        self, run: RunFolder, sampler: NodeSampler, *, every: float, gauges: RayGauges | None, watch: MemoryWatch,
        warn: Callable[[MemoryWarning], None], tags: Callable[[], dict[str, Any] | None] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._run, self._sampler, self._every, self._gauges = run, sampler, every, gauges
        self._watch, self._warn, self._tags, self._clock = watch, warn, tags, clock
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="telemetry")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End after the sample that is being taken; waits for it at most a second."""
        self._over.set()
        self._thread.join(1.0)

    def sample(self) -> dict[str, Any] | None:
        """Take, write, publish and judge one sample; returns the row, None where none is due."""
        tags = self._tags()
        if tags is None:
            return None
        row = {**self._sampler.sample(), **tags}
        self._run.writer(f"telemetry/{self._sampler.node}.jsonl").write(row)
        if self._gauges is not None:
            self._gauges.publish(row)
        for warning in self._watch.look(row):
            self._warn(warning)
        return row

    def _loop(self) -> None:
        due = self._clock() + min(FIRST_AFTER_S, self._every)
        while not self._over.wait(max(0.0, due - self._clock())):
            try:
                self.sample()
            except RunError as error:  # a full disk, which ends the run where it has to write
                node = self._sampler.node
                self._warn(MemoryWarning(f"end {node}", "telemetry_ended", f"telemetry of {node} ended: {error}"))
                return
            due += self._every * max(1, math.ceil((self._clock() - due) / self._every))


@contextlib.contextmanager
def node_telemetry(
    run_path: str, *, every: float, limit: int | None, channel: Any, tags: Callable[[], dict[str, Any] | None]
) -> Iterator[None]:
    """Context manager in which the node of this worker is sampled, every `every` seconds (0: not at all). `limit` is
    `cluster.memory_limit`; the warnings go to the `channel`; `tags` are as for `TelemetryThread`."""
    if not every:
        yield
        return
    thread, run = _thread(run_path, every=every, limit=limit, channel=channel, tags=tags)
    thread.start()
    try:
        yield
    finally:
        thread.close()
        with contextlib.suppress(RunError):  # an upload; the run's own files tell of a storage that is gone
            run.close()


@dataclass(frozen=True)
class HostTelemetry:
    """How expert hosts sample the nodes that no worker is on; attributes as arguments of `node_telemetry`."""

    run_path: str
    every: float
    limit: int | None
    channel: Any

    def start(self) -> None:
        """Begin in this process, until it ends; the channel says before each sample whether it is due."""
        if not self.every:
            return
        import ray
        import ray.exceptions

        context = ray.get_runtime_context()
        node, host = context.get_node_id(), context.get_actor_id()

        def tags() -> dict[str, Any] | None:
            try:
                return ray.get(self.channel.samples_node.remote(node, host, self.every), timeout=ANSWER_S)
            except ray.exceptions.RayError:  # the driver is gone, or busy
                return None

        _thread(self.run_path, every=self.every, limit=self.limit, channel=self.channel, tags=tags)[0].start()


def _thread(
    run_path: str, *, every: float, limit: int | None, channel: Any, tags: Callable[[], dict[str, Any] | None]
) -> tuple[TelemetryThread, RunFolder]:
    import ray

    run = RunFolder(run_path)
    sampler = NodeSampler(node_name(ray.util.get_node_ip_address()))
    name = run.path.rstrip("/").rpartition("/")[2]

    def warn(warning: MemoryWarning) -> None:
        channel.warn.remote(warning.key, warning.what, warning.text, warning.figures)

    thread = TelemetryThread(
        run, sampler, every=every, gauges=RayGauges(name), watch=MemoryWatch(limit=limit), warn=warn, tags=tags
    )
    return thread, run
