"""Processes that read a map-style dataset beside training: persistent, in order, bounded.

They are forks of the training process, so that a dataset need not be picklable and is not copied. What an item draws at
random does not depend on them (`raytrain.data.rows.map_style`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import traceback
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from raytrain.data.loading.prefetch import BatchRequest
from raytrain.data.loading.shared_memory import receive, send
from raytrain.data.rows.contract import Batch
from raytrain.data.rows.map_style import DatasetSplit, seeded_batch
from raytrain.errors import InputError, RunError, first_line

ENDING_S = 5.0
NAMED_ROWS = 5
_ENDS: set[int] = set()
"""This process's ends of all lines, as descriptors: a fork closes them, or the other end would never seem closed."""


class LoaderPool:
    """So many processes, each with a line of its own; requests go to them in turn.

    Args:
        splits: what may be read, by name.
        workers: processes.
        prefetch: batches ahead for each of them.
        seed: the job's.
    """

    def __init__(self, splits: Mapping[str, DatasetSplit], *, workers: int, prefetch: int, seed: int) -> None:
        self.depth = workers * prefetch
        """Batches that are asked for at a time."""
        self.high_water = 0
        context = multiprocessing.get_context("fork")
        self._lines: list[Any] = []  # of Connection, which is another class on Windows
        self._processes: list[BaseProcess] = []
        for number in range(workers):
            ours, theirs = context.Pipe()
            self._lines.append(ours)
            _ENDS.add(ours.fileno())
            process = context.Process(
                target=_serve, args=(theirs, splits, seed, sorted(_ENDS)), daemon=True, name=f"loader-{number}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._unwanted: set[int] = set()
        self._open: set[int] = set()
        self._asked = 0
        self._lock = threading.RLock()  # a generator that is collected inside it forgets its requests
        self._end = weakref.finalize(self, _end, self._lines, self._processes)

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def begin(self, wanted: BatchRequest) -> PendingRead:
        """Ask for a batch."""
        number, self._asked = self._asked, self._asked + 1
        self._open.add(number)
        self.high_water = max(self.high_water, len(self._open))
        line = number % len(self._lines)
        try:
            self._lines[line].send((number, wanted))
        except OSError as error:
            raise self._death(line) from error
        return PendingRead(self, number, wanted)

    def result(self, number: int) -> Batch:
        """The batch of a request, on the host.

        Raises:
            InputError: what the dataset gave is no row.
            RunError: reading failed, with the dataset's own traceback; or a process died.
        """
        with self._lock:
            while number not in self._arrived:
                self._receive()
            self._open.discard(number)
            kind, value = self._arrived.pop(number)
        if kind == "input":
            raise InputError(value[0], seen=value[1], expected=value[2], remedy=value[3])
        if kind == "error":
            raise RunError(value)
        return value

    def forget(self, number: int) -> None:
        """Nobody wants this batch any more."""
        with self._lock:
            self._open.discard(number)
            if self._arrived.pop(number, None) is None:
                self._unwanted.add(number)

    def _receive(self) -> None:
        """Wait for any process: for what it says, or for its end."""
        ends = {process.sentinel: number for number, process in enumerate(self._processes)}
        ready = wait([*self._lines, *ends])
        for line in ready:
            if not isinstance(line, Connection):
                continue
            try:
                (number, kind), value = receive(line)
            except (EOFError, OSError) as error:
                raise self._death(self._lines.index(line)) from error
            if number in self._unwanted:
                self._unwanted.discard(number)
            else:
                self._arrived[number] = (kind, value)
        dead = [ends[end] for end in ready if isinstance(end, int)]
        if dead and not any(isinstance(line, Connection) for line in ready):
            raise self._death(dead[0])

    def _death(self, number: int) -> RunError:
        process = self._processes[number]
        process.join(ENDING_S)
        code = process.exitcode
        how = f"with exit code {code}" if code is None or code >= 0 else f"by {signal.Signals(-code).name}"
        return RunError(
            f"loader process {number} (pid {process.pid}) ended {how} while it read data; "
            "data.loader_workers: 0 reads in the training process"
        )

    def close(self) -> None:
        """End the processes; may be called twice."""
        self._end()


class PendingRead:
    """A batch that a process reads."""

    def __init__(self, pool: LoaderPool, number: int, wanted: BatchRequest) -> None:
        self._pool, self._number, self.wanted = pool, number, wanted

    def result(self) -> Batch:
        """Wait for it; see `LoaderPool.result`."""
        return self._pool.result(self._number)

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self._pool.forget(self._number)


def _end(lines: list[Any], processes: list[BaseProcess]) -> None:
    """A process whose line is closed leaves by itself; one that hangs in somebody's code is killed."""
    for line in lines:
        _ENDS.discard(line.fileno())
        line.close()
    for process in processes:
        process.join(ENDING_S)
        if process.is_alive():
            process.kill()
            process.join()


# -- in the process -------------------------------------------------------------------------------


def _serve(line: Connection, splits: Mapping[str, DatasetSplit], seed: int, held: list[int]) -> None:
    """Read what is asked for until the line is closed, by whomever.

    A thread takes requests off the line at once: with both ends sending, neither would go on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process, whose end ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    torch.set_num_threads(1)
    asked: queue.SimpleQueue[tuple[int, BatchRequest]] = queue.SimpleQueue()
    threading.Thread(target=_take, args=(line, asked), daemon=True).start()
    while True:
        number, wanted = asked.get()
        split = splits[wanted.split]
        try:
            kind, value = _answered(split, wanted, seed)
            try:
                send(line, (number, kind), value)
            except OSError:
                raise
            except Exception as error:  # an object in it cannot be sent; told to the training process, which raises it
                send(line, (number, "error"), _failed(split, wanted, error))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)


def _take(line: Connection, asked: queue.SimpleQueue[tuple[int, BatchRequest]]) -> None:
    while True:
        try:
            asked.put(line.recv())
        except (EOFError, OSError):
            os._exit(0)


def _answered(split: DatasetSplit, wanted: BatchRequest, seed: int) -> tuple[str, Any]:
    try:
        return "batch", seeded_batch(split, wanted.rows, seed=seed, epoch=wanted.epoch)
    except InputError as error:
        return "input", (error.key, error.seen, error.expected, error.remedy)
    except Exception as error:  # told to the training process, which raises it
        return "error", _failed(split, wanted, error)


def _failed(split: DatasetSplit, wanted: BatchRequest, error: Exception) -> str:
    """What went wrong just now in one line, with its traceback below."""
    rows = ", ".join(map(str, split.rows[wanted.rows[:NAMED_ROWS]].tolist()))
    more = ", ..." if len(wanted.rows) > NAMED_ROWS else ""
    what = f"{type(error).__name__}: {first_line(error)}"
    return f"{split.key} failed while rows {rows}{more} were read: {what}\n{traceback.format_exc()}"
