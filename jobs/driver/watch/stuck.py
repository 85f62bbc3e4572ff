"""Workers that do not respond, or whose step or evaluation does not end: who they are, where they are, and their end.

When the process of one is ended, the controller restarts all workers from the latest checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import ray

from cluster.placement import on_node
from cluster.telemetry.stacks import outside_stacks
from jobs.driver.watch.hang_watch import HangWatch
from jobs.driver.watch.silence import Silence, SilentRanks
from raytrain.config.sections import RetryConfig
from raytrain.execution.driver_channel import STARTING, stacks_file, step_of
from raytrain.runs.faults import record_lost_ranks
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import event


class StuckWorkers:
    """Names stuck workers, and ends their processes.

    Args:
        channel: the `DriverChannel` actor.
        local: the workers are processes of this machine.
    """

    def __init__(self, run: RunFolder, channel: Any, retry: RetryConfig, *, local: bool) -> None:
        self._run, self._channel, self._retry, self._local = run, channel, retry, local
        self._named, self._hang = SilentRanks(), HangWatch(hang_s=retry.hang_s)
        self._silence = Silence(limit_s=retry.host_silence_s)
        self._ended = set[int]()

    def lines(
        self,
        progress: Mapping[str, Any],
        signs: Mapping[int, tuple[float, str]],
        stacks: Mapping[int, Mapping[str, Any]],
    ) -> list[str]:
        """Call it often; returns what is new, and records it in the events of the run.

        Args:
            progress: as shown by the driver. signs: as in `Silence.overdue`. stacks: as `DriverChannel.stacks` returns.
        """
        lines = []
        silent = self._silence.overdue(signs, progress)
        if self._hang.due(progress, silent=bool(silent)):
            self._channel.request_stacks.remote()
        else:
            lines = self._of_late_step(signs, stacks)
        if self._hang.asking:
            silent = {}  # once all that respond have said where they are
        for rank in sorted({*silent, *self._hang.overdue(signs)} - self._ended):
            seconds, what = self._hang.late_s, self._hang.reason_to_end(rank)
            if rank in silent:
                seconds = silent[rank]
                doing = progress.get("activity") or progress.get("phase") or STARTING
                what = f"has not responded for {silent[rank]:.0f} s (the run: {doing})"
                self._write_stacks(rank, signs)
            lines.append(self._end(rank, what, signs, seconds=seconds, progress=progress))
        self._ended &= set(signs)
        others = {rank: sign for rank, sign in signs.items() if rank not in self._ended}
        return lines + self._named.lines(others, now=time.time(), limit_s=self._retry.host_silence_s)

    def _of_late_step(
        self, signs: Mapping[int, tuple[float, str]], stacks: Mapping[int, Mapping[str, Any]]
    ) -> list[str]:
        lines = self._hang.lines(signs, stacks, now=time.time())
        if lines and self._hang.event is not None:
            self._run.append_event(event("hang", **self._hang.event))
            for rank in self._hang.event["silent"]:
                self._write_stacks(rank, signs)
        return lines

    def _write_stacks(self, rank: int, signs: Mapping[int, tuple[float, str]]) -> None:
        """What can be seen of a process of this machine that does not answer."""
        if self._local:
            self._run.write_text(stacks_file(rank), outside_stacks(pid_of(signs[rank][1])))

    def _end(
        self, rank: int, what: str, signs: Mapping[int, tuple[float, str]], *, seconds: float,
        progress: Mapping[str, Any],
    ) -> str:  # fmt: skip
        """End the process of a rank, with a record of why: Ray would say only that it died.

        Args:
            seconds: how long nothing has come of it.
        """
        self._ended.add(rank)
        pid, node = pid_of(signs[rank][1]), progress.get("nodes", {}).get(rank)
        reason = f"rank {rank} {what}: its process is ended, all restart"
        self._run.append_event(event("hang_ended", rank=rank, pid=pid, seconds=seconds, reason=reason))
        message = f"rank {rank} {what}, and its process was ended"
        record_lost_ranks(self._run, [rank], message=message, step=step_of(progress), node=node)
        end_process(pid, node=None if self._local else node)
        return reason


def pid_of(where: str) -> int:
    """The process id in the words of `signs_of_life`."""
    return int(where.rpartition("(pid ")[2].rstrip(")"))


def end_process(pid: int, *, node: str | None) -> None:
    """Kill a worker that does not respond: Ray notices its death and starts all workers again.

    Args:
        node: id of its node, where a task of Ray kills it; None: this machine.
    """
    if node is None:
        kill(pid)
    else:
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": on_node(node)}
        ray.remote(kill).options(**options).remote(pid)


def kill(pid: int) -> None:
    """Kill a process of this machine, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
