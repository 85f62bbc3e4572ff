"""Between driver and rank 0: a stop request, progress, printed lines, an attempt's result, where a worker is.

A small Ray actor: workers write to it, and the driver's loop (`jobs.driver.watch`) reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from cluster.ray_runtime import on_this_node
from cluster.telemetry.processes import WORK, own_stacks, stack_of, thread_named
from raytrain.runs.folder import RunFolder

#: Phases of a run in which no worker can report: before the workers are connected, and after one failed.
STARTING, SETTING_UP, RESTARTING = "starting workers", "setting up the workers", "restarting the workers"

#: Progress fields that end with an attempt.
ATTEMPT_FIELDS = ("max_steps", "row", "activity")

#: Begins what an expert host says of computing in another way than planned: a printed line, and an event `fallback`.
FELL_BACK = "fell back: "
#: Seconds between the signs of life of a worker.
SIGN_EVERY_S = 3.0
#: A worker waits this long for the answer to a sign of life.
ANSWER_S = 2.0


def step_of(progress: Mapping[str, Any]) -> int | None:
    """The step after the last one that rank 0 has reported; None before the attempt has reached its first."""
    if progress.get("max_steps") is None:
        return None
    return 1 + max(int(progress.get("step") or 0), int((progress.get("row") or {}).get("step") or 0))


def stacks_file(rank: int) -> str:
    """Name in the run folder of the stacks of a rank that hung, or waited for one that did."""
    return f"logs/rank_{rank:05d}.stacks"


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended, as rank 0 returns it or as the driver determines it."""

    status: Literal["done", "failed", "interrupted"]
    reason: str
    steps: int = 0  # optimizer steps of the run so far; 0 where the driver does not know
    workers_running: bool = False  # the driver exited without waiting for the workers


class DriverChannel:
    """Runs in its own actor. Every method is async, so that a waiting call blocks no other call."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._stored = asyncio.Event()
        self._kept: dict[str, Any] = {}
        self._not_kept: dict[str, str] = {}
        self._progress: dict[str, Any] = {}
        self._ended = False  # a worker failed, and the group that replaces its own has not started
        self._seen: dict[int, tuple[float, str]] = {}
        self._work: dict[int, int] = {}
        self._lines: dict[str, dict[int, str]] = {}
        self._next: dict[str, int] = {}
        self._warnings: dict[str, dict[str, Any]] = {}
        self._samplers: dict[str, tuple[str, float]] = {}  # by node: an expert host, and when it sampled
        self._stack_request = 0
        self._stacks: dict[int, dict[str, Any]] = {}

    async def keep(self, name: str, value: Any) -> None:
        """Driver: store a value for the workers; `raytrain.execution.ray_private` says why it does not own it."""
        import ray

        try:
            self._kept[name] = ray.put(value)
        except Exception as error:
            self._not_kept[name] = f"{type(error).__name__}: {error}"
        finally:
            self._stored.set()

    async def kept(self, name: str) -> list[Any]:
        """Worker: [reference] of a value, as soon as it is stored. Raises RuntimeError if it could not be stored."""
        while name not in self._kept:
            if name in self._not_kept:
                raise RuntimeError(f"Ray could not store the {name} of this run: {self._not_kept[name]}")
            self._stored.clear()
            await self._stored.wait()
        return [self._kept[name]]

    async def request_stop(self) -> None:
        """Driver: ask the workers to save after the current step and return."""
        self._stop.set()

    async def wait_for_stop(self) -> None:
        """Rank 0: returns once a stop is requested (`on_stop_request` waits in this call)."""
        await self._stop.wait()

    async def report_group(self, phase: str, **fields: Any) -> None:
        """Ray's controller: a worker group starts (`SETTING_UP`) or has failed and is replaced (`RESTARTING`).

        What the processes of a failed group still send is dropped: a survivor may notice the death, and report that it
        recovers, after the controller has given its group up. Nor do step, loss and activity of the lost attempt hold
        for the next one, which tells its own with its first step.
        """
        for name in ATTEMPT_FIELDS:
            self._progress.pop(name, None)
        self._progress.update(fields, phase=phase)
        self._ended = phase == RESTARTING
        self._seen.clear()  # other processes follow
        self._work.clear()

    async def report_progress(self, progress: dict[str, Any]) -> None:
        """Rank 0: update the progress shown by the driver: {"phase", "step", "row", ...}."""
        if not self._ended:
            self._progress.update(progress)

    async def samples_node(self, node: str, host: str, every: float) -> dict[str, Any] | None:
        """An expert host, before each sample of its node: the fields of the row, or None where it takes none.

        A worker samples its own node, and one host a node without workers: another takes over once it is silent.
        """
        nodes, (sampler, seen) = self._progress.get("nodes"), self._samplers.get(node, (host, 0.0))
        now = time.monotonic()
        if not nodes or node in nodes.values() or (sampler != host and now - seen < 2 * every + ANSWER_S):
            return None
        self._samplers[node] = (host, now)
        return {"step": self._progress.get("step", 0)}

    async def sign_of_life(self, rank: int, where: str, work: int = 0) -> int:
        """A worker, every few seconds: it responds, with its node and process id in words, and its `WorkCount.done`.

        Returns the number of the newest request for its stacks; 0: none was made.
        """
        if not self._ended:
            self._seen[rank], self._work[rank] = (time.time(), where), work
        return self._stack_request

    async def request_stacks(self) -> None:
        """Driver: no step ends; the workers are to say where they are."""
        self._stack_request += 1
        self._stacks = {}

    async def report_stacks(self, rank: int, place: dict[str, Any]) -> None:
        """A worker has written its stacks: {"waits": whether it waits for other processes, "place": where it is}."""
        self._stacks[rank] = place

    async def stacks(self) -> dict[int, dict[str, Any]]:
        """Driver: what the workers have answered to the newest request."""
        return self._stacks

    async def leave(self, rank: int) -> None:
        """A worker that has returned: it is not expected to respond any more."""
        self._seen.pop(rank, None)

    async def last_signs(self) -> dict[int, tuple[float, str]]:
        """Driver: (unix time of the last sign of life, where) of each worker that has not returned."""
        return self._seen

    async def warn(self, key: str, what: str, text: str, figures: dict[str, Any]) -> None:
        """The telemetry of a node: a warning of the kind `what`, its text and the figures for its event. The first of
        each key is kept."""
        self._warnings.setdefault(key, {"key": key, "what": what, "reason": text, **figures})

    async def warnings(self) -> list[dict[str, Any]]:
        """Driver: the first warning of each key, {"key", "what", "reason", ...}."""
        return list(self._warnings.values())

    async def progress(self) -> dict[str, Any]:
        """Driver: the newest value of every progress field, and as "work" the sum of the workers' `WorkCount.done`."""
        return {**self._progress, "work": sum(self._work.values())}

    async def print_lines(self, attempt_id: str, number: int, text: str) -> None:
        """Rank 0: send complete lines that its code printed to the driver's terminal. `number` counts the calls of an
        attempt from 0, since Ray may run them out of order."""
        self._lines.setdefault(attempt_id, {})[number] = text

    async def printed_lines(self, *, last: bool = False) -> str:
        """Driver: the lines printed since the last call, in order.

        A text whose predecessor has not arrived is held back, unless a newer attempt has printed lines or this is the
        `last` call.
        """
        texts = []
        newest = next(reversed(self._lines), None)
        for attempt_id, waiting in self._lines.items():
            number = self._next.get(attempt_id, 0)
            while number in waiting:
                texts.append(waiting.pop(number))
                number += 1
            self._next[attempt_id] = number
            if last or attempt_id != newest:
                texts += [waiting.pop(number) for number in sorted(waiting)]
        return "".join(texts)


@contextlib.contextmanager
def signs_of_life(
    channel: Any, rank: int, *, write_stacks: Callable[[], dict[str, Any]] | None = None
) -> Iterator[None]:
    """Worker: tell the channel every `SIGN_EVERY_S` seconds that this process responds, until the end of the block.

    Args:
        write_stacks: called in the thread when the driver asks where this worker is; returns what
            `DriverChannel.report_stacks` takes. None: the worker does not answer.
    """
    import ray
    import ray.exceptions

    where, over = f"on {ray.util.get_node_ip_address()} (pid {os.getpid()})", threading.Event()

    def tell() -> None:
        answered: int | None = None  # a request that was made before this process started is not for it
        while True:
            answer = channel.sign_of_life.remote(rank, where, WORK.done)
            if write_stacks is not None:
                with contextlib.suppress(ray.exceptions.RayError):  # it does not answer soon, or the driver has exited
                    request = int(ray.get(answer, timeout=ANSWER_S))
                    if answered is not None and request > answered:
                        channel.report_stacks.remote(rank, write_stacks())
                    answered = request
            if over.wait(SIGN_EVERY_S):
                return

    thread = threading.Thread(target=tell, daemon=True, name="signs-of-life")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        channel.leave.remote(rank)


class OwnProcess:
    """In place of the actor where the worker runs in the driver's own process, without Ray (`train --debug`): a request
    to stop sets `asked`, and `show` receives the progress."""

    def __init__(self, asked: threading.Event, show: Callable[[dict[str, Any]], None]) -> None:
        self.asked = asked
        self.report_progress = SimpleNamespace(remote=show)


def open_channel() -> Any:
    """Start the `DriverChannel` actor on the driver's node; it reserves no CPU and dies with the driver."""
    import ray

    options = {"num_cpus": 0, "max_concurrency": 64, "scheduling_strategy": on_this_node()}
    return ray.remote(DriverChannel).options(**options).remote()


def kept(channel: Any, name: str) -> Any:
    """Worker: a value that the driver gave the `DriverChannel` actor (`DriverChannel.keep`)."""
    import ray

    return ray.get(ray.get(channel.kept.remote(name))[0])


def on_stop_request(channel: Any, then: Callable[[], None]) -> None:
    """Call `then` in a background thread once the driver requests a stop through the `DriverChannel` actor."""

    def wait() -> None:
        if isinstance(channel, OwnProcess):
            channel.asked.wait()
            then()
            return
        import ray
        import ray.exceptions

        with contextlib.suppress(ray.exceptions.RayError):  # the driver has exited, and the cluster with it
            ray.get(channel.wait_for_stop.remote())
            then()

    threading.Thread(target=wait, daemon=True, name="stop-request").start()


# ---------------------------------------------------------------- stacks
# Where a worker is, for the driver that asks because no step ends.


#: The end of the path of a module in which a worker waits for others, and the function; "" is any of the module.
COLLECTIVES = (
    ("train/parallel/collectives.py", ""), ("train/parallel/order.py", ""), ("train/parallel/fsdp.py", "__call__"),
    ("experts/transport.py", ""),
)  # fmt: skip
#: Likewise where it waits for its own thread that writes a checkpoint, and how that thread is named.
WRITERS = (("checkpoint/writer.py", "", "checkpoint"), ("train/parallel/fsdp.py", "wait", "shards"))


def _is_in(frame: traceback.FrameSummary, module: str, function: str) -> bool:
    return frame.filename.endswith(module) and function in ("", frame.name)


def write_stacks(run: RunFolder, rank: int, thread: int) -> dict[str, Any]:
    """Write the stacks of this process to logs/rank_00000.stacks; returns what `DriverChannel.report_stacks` takes.
    `thread` is the training thread."""
    stack = stack_of(thread)
    for module, function, name in WRITERS:  # a save waits for the thread that writes the one before it, or the last
        writes = thread_named(name)
        if writes is not None and any(_is_in(frame, module, function) for frame in stack):
            stack = stack_of(writes) or stack
            break
    run.write_text(stacks_file(rank), own_stacks())
    collective = [frame for frame in stack if any(_is_in(frame, *place) for place in COLLECTIVES)]
    place = (collective or stack or [None])[-1]
    where = "" if place is None else f"{place.name} ({os.path.basename(place.filename)}:{place.lineno})"
    return {"waits": bool(collective), "place": where}
