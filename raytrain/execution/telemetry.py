"""Samples the node of a worker from a thread, and writes, publishes and judges the rows.

One thread on each node: the worker whose local rank is 0 starts it. It reads files of the kernel and NVML, a few
milliseconds per sample, and never calls torch; the training thread takes no part.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from cluster.telemetry.gauges import RayGauges
from cluster.telemetry.sampler import NodeSampler, node_name
from cluster.telemetry.warnings import MemoryWarning, MemoryWatch
from raytrain.errors import RunError
from raytrain.runs.folder import RunFolder

#: The first sample comes this soon, so that a short run has one; utilisation needs some time to count over.
FIRST_AFTER_S = 1.0


class TelemetryThread:
    """Takes a sample every `every` seconds until `close`.

    Args:
        run: the run folder; rows go to telemetry/<node>.jsonl.
        sampler: of this node.
        gauges: publishes the rows; None without Ray.
        watch: judges the rows.
        warn: called with each warning, repeated ones included; in the thread.
        tags: fields of every row, such as the step; called in the thread.
    """

    def __init__(
        self,
        run: RunFolder,
        sampler: NodeSampler,
        *,
        every: float,
        gauges: RayGauges | None,
        watch: MemoryWatch,
        warn: Callable[[MemoryWarning], None],
        tags: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._run, self._sampler, self._every, self._gauges = run, sampler, every, gauges
        self._watch, self._warn, self._tags = watch, warn, tags
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="telemetry")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End after the sample that is being taken; waits for it at most a second."""
        self._over.set()
        self._thread.join(1.0)

    def sample(self) -> dict[str, Any]:
        """Take, write, publish and judge one sample; returns the row."""
        row = {**self._sampler.sample(), **self._tags()}
        self._run.writer(f"telemetry/{self._sampler.node}.jsonl").write(row)
        if self._gauges is not None:
            self._gauges.publish(row)
        for warning in self._watch.look(row):
            self._warn(warning)
        return row

    def _loop(self) -> None:
        wait_s = min(FIRST_AFTER_S, self._every)
        while not self._over.wait(wait_s):
            wait_s = self._every
            try:
                self.sample()
            except RunError as error:  # a full disk, which ends the run where it has to write
                node = self._sampler.node
                self._warn(MemoryWarning(f"end {node}", "telemetry_ended", f"telemetry of {node} ended: {error}"))
                return


@contextlib.contextmanager
def node_telemetry(
    run_path: str, *, every: float, limit: int | None, channel: Any, tags: Callable[[], dict[str, Any]]
) -> Iterator[None]:
    """Context manager in which the node of this worker is sampled.

    Args:
        every: seconds between samples; 0: none are taken.
        limit: `cluster.memory_limit`.
        channel: the `DriverChannel` actor, which receives the warnings.
    """
    if not every:
        yield
        return
    import ray

    run = RunFolder(run_path)
    sampler = NodeSampler(node_name(ray.util.get_node_ip_address()))
    name = run.path.rstrip("/").rpartition("/")[2]

    def warn(warning: MemoryWarning) -> None:
        channel.warn.remote(warning.key, warning.what, warning.text, warning.figures)

    thread = TelemetryThread(
        run, sampler, every=every, gauges=RayGauges(name), watch=MemoryWatch(limit=limit), warn=warn, tags=tags
    )
    thread.start()
    try:
        yield
    finally:
        thread.close()
        with contextlib.suppress(RunError):  # an upload; the run's own files tell of a storage that is gone
            run.close()
