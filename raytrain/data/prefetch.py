"""Batches ahead of their step: bounded and in order, read by processes, copied to a GPU while it computes.

The training loader uses it for data that is not on the device. A batch passes between processes in memory that both
map.
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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from cluster.ray_runtime import keep_parents_objects
from raytrain.accelerator import gpu_module, on_gpu
from raytrain.data.rows.contract import Batch
from raytrain.data.rows.map_style import DatasetSplit, seeded_batch
from raytrain.data.rows.residency import dense, rebuild, tensors_of
from raytrain.errors import InputError, RunError, first_line, printable

# ---------------------------------------------------------------- prefetch
# Prefetch batches: a bounded number, in order, discarded when the order changes (micro-batch size, rollback).


Item = TypeVar("Item")
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class BatchRequest:
    """A batch: these rows of a split, in `epoch` (from 0; random draws of a dataset depend on it)."""

    split: str
    epoch: int
    rows: np.ndarray

    def same(self, other: BatchRequest) -> bool:
        return (self.split, self.epoch) == (other.split, other.epoch) and np.array_equal(self.rows, other.rows)


class PendingBatch(Protocol[Result]):
    def result(self) -> Result:
        """Wait for the batch; raises the error that its making raised."""
        ...

    def cancel(self) -> object: ...


def prefetch(
    items: Iterable[Item], begin: Callable[[Item], PendingBatch[Result]], *, depth: int
) -> Generator[tuple[Item, PendingBatch[Result]]]:
    """Start work for each item ahead of its use; yield each item with its pending result.

    At most `depth` results are pending at a time, the yielded one included: a consumer that asks for the next item as
    soon as it has a result keeps `depth` of them in the making. Closing the generator cancels what is left.
    """
    waiting: deque[tuple[Item, PendingBatch[Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, begin(item)))
            if len(waiting) >= depth:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for _, pending in waiting:
            pending.cancel()


class Prefetcher(Generic[Result]):
    """Batches that are made while earlier ones are used. `start`: from an iterator of requests to a generator of
    (request, pending batch), as `prefetch` returns."""

    def __init__(
        self, start: Callable[[Iterator[BatchRequest]], Generator[tuple[BatchRequest, PendingBatch[Result]]]]
    ) -> None:
        self._start = start
        self._running: Generator[tuple[BatchRequest, PendingBatch[Result]]] | None = None
        self._next: tuple[BatchRequest, PendingBatch[Result]] | None = None
        self.restarts = 0

    def take(self, request: BatchRequest, *, then: Callable[[], Iterator[BatchRequest]]) -> Result:
        """The requested batch.

        `then` returns the requests from this one on; it is called only if another batch was prefetched.
        """
        if self._next is None or not self._next[0].same(request):
            self.stop()
            self.restarts += 1
            self._running = self._start(then())
            self._next = next(self._running)
            assert self._next[0].same(request), "the requests begin with the one asked for"
        (_, pending), self._next = self._next, None
        result = pending.result()
        if self._running is not None:
            self._next = next(self._running, None)  # before this one is used, so that the makers never wait
        return result

    def stop(self) -> None:
        if self._next is not None:
            self._next[1].cancel()
            self._next = None
        if self._running is not None:
            self._running.close()
            self._running = None


# ---------------------------------------------------------------- pinned upload
# Copy batches to a GPU while it computes: a thread gathers and pins them, and a separate CUDA stream copies.


#: Batches on the device in addition to the one in use.
UPLOAD_DEPTH = 2


class BatchUploader(Generic[Result]):
    """One thread and one CUDA stream; the host never waits for a copy. On a CPU there is only the thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = gpu_module(device).Stream(device) if on_gpu(device) else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")

    def begin(self, make: Callable[[], Result], unwanted: Callable[[], object] = lambda: None) -> PendingUpload[Result]:
        """Make a batch in the thread; its copies and kernels go to the stream. `unwanted` is called if the batch is
        cancelled before the thread starts on it."""
        return PendingUpload(self._thread.submit(self._made, make), self._stream, unwanted)

    def _made(self, make: Callable[[], Result]) -> tuple[Result, torch.Event | None]:
        if self._stream is None:
            return make(), None
        gpu = gpu_module(self._device)
        with gpu.device(self._device), gpu.stream(self._stream):
            made = make()
            return made, self._stream.record_event()

    def close(self) -> None:
        """End the thread; batches that it has not started on are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class PendingUpload(Generic[Result]):
    _future: Future[tuple[Result, torch.Event | None]]
    _stream: torch.Stream | None
    _unwanted: Callable[[], object]

    def result(self) -> Result:
        """The batch. Kernels that are queued from now on wait for its copies; the host does not."""
        made, copied = self._future.result()
        if self._stream is not None and copied is not None:
            current = gpu_module(self._stream.device).current_stream(self._stream.device)
            current.wait_event(copied)
            for _, tensor in tensors_of(made, ""):
                tensor.record_stream(current)  # its memory belongs to the other stream
        return made

    def cancel(self) -> None:
        """Give the batch up; it is not made if the thread has not started on it."""
        if self._future.cancel():
            self._unwanted()


# ---------------------------------------------------------------- shared memory
# Send a batch to another process: its tensors in memory that both map, everything else through the pipe.


#: Where each tensor begins in the memory: a multiple of this.
ALIGNED = 64


@dataclass(frozen=True)
class _Part:
    """Stands for a tensor: where its bytes begin, and what they are. `last`: channels are its last dimension there."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    last: bool


def send(line: Connection, head: Any, value: Any) -> None:
    """Send `head` and a value of any nesting. Raises BrokenPipeError, ConnectionResetError: the other end has closed
    the pipe. OSError: no memory is left. Exception: what Python raises of an object that cannot be sent; nothing
    was."""
    parts: list[tuple[int, np.ndarray]] = []
    rest = _apart(value, parts)
    end = _end_of(parts)
    if not end:
        line.send((head, rest, 0))
        return
    with open(os.memfd_create("batch", os.MFD_CLOEXEC), "wb") as file:
        for _, part in parts:
            file.write(part.data)
            file.write(bytes(-part.nbytes % ALIGNED))
        file.flush()
        line.send((head, rest, end))
        send_handle(line, file.fileno(), None)


def receive(line: Connection) -> tuple[Any, Any]:
    """The next (head, value) of a line; tensors lie in the memory that came with it, which goes with the last of
    them. Raises EOFError, OSError: the other end is gone."""
    head, rest, size = line.recv()
    memory: Any = torch.UntypedStorage(0)
    if size:
        descriptor = recv_handle(line)
        try:  # torch keeps no descriptor of what it maps; Python's mmap keeps one for as long as it lives
            memory = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", True, size)
        finally:
            os.close(descriptor)

    return head, _together(rest, memory)


# Functions of the module, not closures: those refer to themselves, and would hold the memory until Python looks for
# such circles.


def _apart(value: Any, parts: list[tuple[int, np.ndarray]]) -> Any:
    """`value` with a `_Part` in place of each plain tensor; (begin, bytes) of each go to the end of `parts`."""
    plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
    # others are sent as torch does: bytes, type and shape are not all there is to them
    if not plain or value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
        return value if isinstance(value, PackedSequence) else rebuild(value, partial(_apart, parts=parts))
    tensor = dense(value)
    last = not tensor.is_contiguous()  # then it is in an order of channels that `dense` leaves alone
    tensor = tensor.movedim(1, -1) if last else tensor
    parts.append((_end_of(parts), tensor.reshape(-1).view(torch.uint8).numpy()))
    return _Part(parts[-1][0], tensor.dtype, tuple(tensor.shape), last)


def _together(value: Any, memory: Any) -> Any:
    if not isinstance(value, _Part):
        return value if isinstance(value, PackedSequence) else rebuild(value, partial(_together, memory=memory))
    tensor = torch.empty(0, dtype=value.dtype)  # not a view: each counts the writes to itself alone
    tensor.set_(memory, value.begin // tensor.element_size(), value.shape)  # pyright: ignore[reportCallIssue]
    return tensor.movedim(-1, 1) if value.last else tensor


def _end_of(parts: list[tuple[int, np.ndarray]]) -> int:
    if not parts:
        return 0
    begin, part = parts[-1]
    return begin + part.nbytes + -part.nbytes % ALIGNED


# ---------------------------------------------------------------- processes
# Processes that read a map-style dataset during training: persistent, in order, with a bounded queue.


ENDING_S = 5.0
NAMED_ROWS = 5
_OPEN_ENDS: set[int] = set()
"""Descriptors of this process's ends of all pipes. A fork closes them; otherwise no pipe would ever read as closed."""


class LoaderPool:
    """Loader processes, each with its own pipe; requests go to them in turn, and each reads `prefetch` batches
    ahead."""

    def __init__(self, splits: Mapping[str, DatasetSplit], *, workers: int, prefetch: int, seed: int) -> None:
        self.depth = workers * prefetch
        """Requests that may be pending at a time."""
        self.high_water = 0
        context = multiprocessing.get_context("fork")
        keep_parents_objects()
        self._pipes: list[Any] = []  # of Connection, which is another class on Windows
        self._processes: list[BaseProcess] = []
        for number in range(workers):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            _OPEN_ENDS.add(ours.fileno())
            process = context.Process(
                target=_serve, args=(theirs, splits, seed, sorted(_OPEN_ENDS)), daemon=True, name=f"loader-{number}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._unwanted: set[int] = set()
        self._open: set[int] = set()
        self._sent = 0
        self._lock = threading.RLock()  # re-entrant: a generator that is collected inside it drops its requests
        self._end = weakref.finalize(self, _end, self._pipes, self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def begin(self, request: BatchRequest) -> PendingRead:
        number, self._sent = self._sent, self._sent + 1
        self._open.add(number)
        self.high_water = max(self.high_water, len(self._open))
        pipe = number % len(self._pipes)
        try:
            self._pipes[pipe].send((number, request))
        except OSError as error:
            raise self._death(pipe) from error
        return PendingRead(self, number, request)

    def result(self, number: int) -> Batch:
        """The batch of a request, on the host. Raises InputError: an item of the dataset is not a row. RunError:
        reading failed (with the dataset's traceback), or a process died."""
        with self._lock:
            while number not in self._arrived:
                self._receive()
            self._open.discard(number)
            kind, value = self._arrived.pop(number)
        if kind == "input":
            raise InputError(value[0], got=value[1], expected=value[2], remedy=value[3])
        if kind == "error":
            raise RunError(value)
        return value

    def forget(self, number: int) -> None:
        with self._lock:
            self._open.discard(number)
            if self._arrived.pop(number, None) is None:
                self._unwanted.add(number)

    def _receive(self) -> None:
        """Wait for any process: for a message of it, or for its exit."""
        ends = {process.sentinel: number for number, process in enumerate(self._processes)}
        ready = wait([*self._pipes, *ends])
        for pipe in ready:
            if not isinstance(pipe, Connection):
                continue
            try:
                (number, kind), value = receive(pipe)
            except (EOFError, OSError) as error:
                raise self._death(self._pipes.index(pipe)) from error
            if number in self._unwanted:
                self._unwanted.discard(number)
            else:
                self._arrived[number] = (kind, value)
        dead = [ends[end] for end in ready if isinstance(end, int)]
        if dead and not any(isinstance(pipe, Connection) for pipe in ready):
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
    def __init__(self, pool: LoaderPool, number: int, request: BatchRequest) -> None:
        self._pool, self._number, self.request = pool, number, request

    def result(self) -> Batch:
        return self._pool.result(self._number)

    def cancel(self) -> None:
        self._pool.forget(self._number)


def _end(pipes: list[Any], processes: list[BaseProcess]) -> None:
    """Close the pipes. A process exits when its pipe is closed; one that hangs in user code is killed."""
    for pipe in pipes:
        _OPEN_ENDS.discard(pipe.fileno())
        pipe.close()
    for process in processes:
        process.join(ENDING_S)
        if process.is_alive():
            process.kill()
            process.join()


# -- in the loader process -------------------------------------------------------------------------------


def _serve(pipe: Connection, splits: Mapping[str, DatasetSplit], seed: int, held: list[int]) -> None:
    """Read the requested batches until either end closes the pipe.

    A thread receives requests immediately: if both ends were blocked in a send, neither would continue.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process; this one ends with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    torch.set_num_threads(1)
    requests: queue.SimpleQueue[tuple[int, BatchRequest]] = queue.SimpleQueue()
    threading.Thread(target=_receive_requests, args=(pipe, requests), daemon=True).start()
    while True:
        number, request = requests.get()
        split = splits[request.split]
        try:
            kind, value = _read_batch(split, request, seed)
            try:
                send(pipe, (number, kind), value)
            except OSError:
                raise
            except Exception as error:  # an object in it cannot be sent: the training process raises this
                send(pipe, (number, "error"), _failure_text(split, request, error))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)


def _receive_requests(pipe: Connection, requests: queue.SimpleQueue[tuple[int, BatchRequest]]) -> None:
    while True:
        try:
            requests.put(pipe.recv())
        except (EOFError, OSError):
            os._exit(0)


def _read_batch(split: DatasetSplit, request: BatchRequest, seed: int) -> tuple[str, Any]:
    try:
        return "batch", seeded_batch(split, request.rows, seed=seed, epoch=request.epoch)
    except InputError as error:
        return "input", (error.key, error.got, error.expected, error.remedy)
    except Exception as error:  # the training process raises it
        return "error", _failure_text(split, request, error)


def _failure_text(split: DatasetSplit, request: BatchRequest, error: Exception) -> str:
    """The current error in one line, with its traceback below."""
    rows = ", ".join(map(str, split.rows[request.rows[:NAMED_ROWS]].tolist()))
    more = ", ..." if len(request.rows) > NAMED_ROWS else ""
    what = f"{type(error).__name__}: {first_line(error)}"
    return f"{split.key} failed while rows {rows}{more} were read: {what}\n{printable(traceback.format_exc())}"
