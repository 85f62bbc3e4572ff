"""Workers that do not respond, and steps, evaluations, saves that do not end: who, how long, where, their end.

`jobs.driver.watch` asks it in each turn of its loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from cluster.ray_runtime import on_node
from cluster.telemetry.processes import EVALUATING, SAVING, SLEEPING, outside_stacks
from jobs.driver.progress import EXPORTING, TRAINING
from raytrain.config.messages import abbreviated
from raytrain.config.sections import RetryConfig
from raytrain.execution.driver_channel import RESTARTING, SIGN_EVERY_S, STARTING, stacks_file, step_of
from raytrain.runs.faults import record_lost_ranks
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import event

#: A step is late after this many times its usual duration, and after this long.
STEPS_LATE, LEAST_STEP_S = 10.0, 5.0
#: An evaluation or a save is late after this long without work, or after `retry.hang_s` if that is less. A slow store
#: may take minutes to close one file.
LEAST_ACTIVITY_S = {EVALUATING: 60.0, SAVING: 300.0, SLEEPING: 300.0}
#: Before the end of the first step, in the export, and with a compiled model, which may compile again in a step: after
#: this long, or after `UNKNOWN_TIMES` `retry.hang_s` if that is less.
UNKNOWN_S = 300.0
#: Before the end of the first step and in the export, the user's code may read all data or convert the model in one
#: call: they are ended only after this many times `retry.hang_s`, unless every rank waits for another.
UNKNOWN_TIMES = 5
#: Rank 0 reports its step this often (`raytrain.execution.reporter`), so that its last step may be this old.
REPORT_EVERY_S = 5.0
#: The driver waits this long for the workers' answers to the question where they are.
ANSWER_LIMIT_S = 10.0
#: Phases in which a process that does not respond is stopped or stuck. Before them the user's code may hold Python's
#: lock for long in one call, as while it unpickles large data: they allow `SETUP_TIMES` the silence.
STEADY = (TRAINING, EXPORTING)
SETUP_TIMES = 5

Signs = Mapping[int, tuple[float, str]]
"""Rank -> (unix time of its last sign of life, where it runs), of the workers that have not returned."""


class StuckWorkers:
    """Names stuck workers, and ends their processes, which `local` says are processes of this machine."""

    def __init__(self, run: RunFolder, channel: Any, retry: RetryConfig, *, local: bool) -> None:
        self._run, self._channel, self._local = run, channel, local
        self._silent, self._hang = SilentRanks(limit_s=retry.host_silence_s), HangWatch(hang_s=retry.hang_s)
        self._ended = set[int]()

    def lines(self, progress: Mapping[str, Any], signs: Signs, stacks: Mapping[int, Mapping[str, Any]]) -> list[str]:
        """Call it often; returns what is new, and records it in the events of the run."""
        lines = []
        silent = self._silent.overdue(signs, progress)
        if self._hang.due(progress, silent=bool(silent)):
            self._channel.request_stacks.remote()
        else:
            lines = self._hang.lines(signs, stacks, now=time.time())
            if lines and self._hang.event is not None:
                self._run.append_event(event("hang", **self._hang.event))
                for rank in self._hang.event["silent"]:
                    self._write_stacks(rank, signs)
        if self._hang.asking:
            silent = {}  # once all that respond have said where they are
        for rank in sorted({*silent, *self._hang.overdue(signs)} - self._ended):
            seconds, what, key = self._hang.late_s, self._hang.reason_to_end(rank), "retry.hang_s"
            if rank in silent:
                seconds, key = silent[rank], "retry.host_silence_s"
                doing = progress.get("activity") or progress.get("phase") or STARTING
                what = f"has not responded for {seconds:.0f} s (the run: {doing})"
                self._write_stacks(rank, signs)
            lines.append(self._end(rank, what, signs, seconds=seconds, key=key, progress=progress))
        self._ended &= set(signs)
        return lines

    def _write_stacks(self, rank: int, signs: Signs) -> None:
        """What can be seen of a process of this machine that does not answer."""
        if self._local:
            self._run.write_text(stacks_file(rank), outside_stacks(pid_of(signs[rank][1])))

    def _end(self, rank: int, what: str, signs: Signs, *, seconds: float, key: str, progress: Mapping[str, Any]) -> str:
        """End the process of a rank, with a record of why: Ray would say only that it died. Nothing has come of it for
        so many `seconds`, and `key` sets how long that may be."""
        self._ended.add(rank)
        pid, node = pid_of(signs[rank][1]), progress.get("nodes", {}).get(rank)
        reason = f"rank {rank} {what}: its process is ended, all restart ({key})"
        self._run.append_event(event("hang_ended", rank=rank, pid=pid, seconds=seconds, reason=reason))
        message = f"rank {rank} {what}, and its process was ended"
        record_lost_ranks(self._run, [rank], message=message, step=step_of(progress), node=node)
        if self._local or node is None:
            kill(pid)
        else:  # Ray starts all workers again
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": on_node(node)}
            ray.remote(kill).options(**options).remote(pid)
        return reason


class SilentRanks:
    """Measures how long each worker has not responded: the others wait for it in the next collective.

    Silence counts from when this process first saw the newest sign of life, on a clock that stands still while the
    machine is suspended: after that, all workers have been silent for as long as the driver.
    """

    def __init__(self, *, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._since: dict[int, tuple[tuple[float, str], float]] = {}

    def overdue(self, signs: Signs, progress: Mapping[str, Any]) -> dict[int, float]:
        """Rank -> seconds, of the workers whose processes are to be ended; call it often."""
        now = self._clock()
        self._since = {
            rank: known if (known := self._since.get(rank)) is not None and known[0] == sign else (sign, now)
            for rank, sign in signs.items()
        }
        limit = self._limit_s * (1 if progress.get("phase") in STEADY else SETUP_TIMES)
        return {rank: now - since for rank, (_, since) in sorted(self._since.items()) if now - since >= limit}


class HangWatch:
    """Learns how long a step takes, and says when one takes far longer, who is absent, and where the others wait.

    So too for the set-up, evaluations, saves and the export: they are late when no worker finishes any work in them
    (`WorkCount`), however long they take. Rank 0's step and activity are known to `REPORT_EVERY_S`.
    """

    def __init__(self, *, hang_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._hang_s, self._clock = hang_s, clock
        self._seen: tuple[int, str, Any] = (-1, "", None)
        self._known = False
        self._since = clock()
        self._asked: float | None = None
        self._said = False
        self.event: dict[str, Any] | None = None  # the fields of the hang that was said last

    @property
    def asking(self) -> bool:
        """The workers were asked where they are, and the line about it has not been said."""
        return self._asked is not None and not self._said

    @property
    def late_s(self) -> float:
        """Seconds since the step, the phase or the activity last changed, or since the last work in it."""
        return self._clock() - self._since

    @property
    def step(self) -> int:
        """The step in which the run is: inside an activity, the last one that was done."""
        return self._seen[0] + (not self._seen[1])

    def due(self, progress: Mapping[str, Any], *, silent: bool = False) -> bool:
        """Whether the workers should be asked where they are: once for a step or an activity that exceeds its deadline,
        or in which a worker is to be ended because it is `silent`."""
        row, phase = progress.get("row") or {}, str(progress.get("phase") or STARTING)
        step = max(int(row.get("step") or 0), int(progress.get("step") or 0))
        activity = str(progress.get("activity") or "") if phase == TRAINING else phase
        usual_s = max(float(row.get("step_time_s") or 0.0), float(row.get("step_ms_p95") or 0.0) / 1000)
        self._known = usual_s > 0 and phase == TRAINING
        seen = step, activity, (progress.get("work"), progress.get("detail")) if activity or not usual_s else None
        if seen != self._seen or phase in (STARTING, RESTARTING):
            self._seen, self._since, self._asked, self._said = seen, self._clock(), None, False
            return False
        least = LEAST_ACTIVITY_S.get(activity, LEAST_STEP_S)
        least = min(least, self._hang_s or least)
        if progress.get("compiles") or not self._known:  # compiled: a step may contain a compilation
            least = min(UNKNOWN_S, UNKNOWN_TIMES * (self._hang_s or UNKNOWN_S))
        deadline = max(least, STEPS_LATE * usual_s) + REPORT_EVERY_S
        if self._asked is not None or (self._clock() - self._since < deadline and not silent):
            return False
        self._asked = self._clock()
        return True

    def stalled(self) -> str:
        """What has not ended or not advanced, with its verb."""
        step, activity, _ = self._seen
        if not activity:
            return f"step {step + 1} has not ended"
        named = {
            EVALUATING: f"the evaluation after step {step}",
            SAVING: f"saving the checkpoint of step {step}",
            SLEEPING: f"the sleep cycle after step {step}",
            EXPORTING: "exporting the weights",
        }
        return f"{named.get(activity, activity)} has not advanced"

    def lines(self, signs: Signs, stacks: Mapping[int, Mapping[str, Any]], *, now: float) -> list[str]:
        """The line about a step that is late, once the workers that respond have answered."""
        if self._asked is None or self._said or not signs:
            return []
        silent = [rank for rank, (last, _) in sorted(signs.items()) if now - last >= 2 * SIGN_EVERY_S]
        waited = self._clock() - self._asked
        if waited < ANSWER_LIMIT_S and set(signs) - set(silent) - set(stacks):
            return []
        self._said = True
        absent = silent or [rank for rank, one in sorted(stacks.items()) if not one["waits"]]
        who = "; ".join(
            f"rank {rank} {signs[rank][1] if rank in signs else ''} "
            + ("does not respond" if rank in silent else f"is in {stacks[rank]['place']}")
            for rank in absent
        )
        others = [f"rank {rank} waits in {one['place']}" for rank, one in sorted(stacks.items()) if rank not in absent]
        late = self._clock() - self._since
        text = f"{self.stalled()} for {late:.0f} s: {who or 'every rank waits for another'}"
        text += f"; {abbreviated(others, 3)}" if others else ""
        text += "; the stacks of every rank are in logs/rank_*.stacks"
        self.event = {"step": self.step, "seconds": late, "ranks": absent, "silent": silent, "reason": text}
        return [text]

    def reason_to_end(self, rank: int) -> str:
        """Of a rank of `overdue`: what is said of it."""
        stuck = "is stuck" if self.event is not None and rank in self.event["ranks"] else "waits"
        return f"{stuck} ({self.stalled()} for {self.late_s:.0f} s)"

    def overdue(self, signs: Signs) -> list[int]:
        """The ranks to end, while something is late and that was said: after `retry.hang_s` seconds without work those
        that the others wait for, or one if all wait. See `UNKNOWN_TIMES`."""
        if not self._said or not signs or self._hang_s is None:
            return []
        absent = self.event["ranks"] if self.event is not None else []
        if self.late_s < self._hang_s * (1 if self._known or not absent else UNKNOWN_TIMES):
            return []
        return [rank for rank in absent if rank in signs] or [min(signs)]


def pid_of(where: str) -> int:
    """The process id in the words of `signs_of_life`."""
    return int(where.rpartition("(pid ")[2].rstrip(")"))


def kill(pid: int) -> None:
    """Kill a process of this machine, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
