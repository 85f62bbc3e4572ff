"""Connections between stages: a queue inside a process, a socket between two.

A socket is closed by the kernel when its process dies, so that the other side notices at once; Ray's object store needs
milliseconds for each call, and a collective of gloo waits for its timeout.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import socket
import threading
from typing import Protocol

import torch
from torch import Tensor

from raytrain.errors import RunError
from raytrain.infer.stages.message import StagePass, decode, encode, sizes_of

SECRET_BYTES = 32
CONNECT_S = 60.0


class StageLost(RunError):
    """Another stage has ended: this replica of the model cannot go on."""


class Link(Protocol):
    """One direction between two stages."""

    def send(self, message: StagePass) -> None:
        """Hand a message on; raises StageLost if nobody can receive it."""
        ...

    def receive(self) -> StagePass | None:
        """Wait for the next message; None once the other side has ended."""
        ...

    def close(self) -> None:
        """No more messages."""
        ...


class LocalLink:
    """Between threads of one process; tensors are handed on as they are."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[StagePass | None] = queue.SimpleQueue()

    def send(self, message: StagePass) -> None:
        self._queue.put(message)

    def receive(self) -> StagePass | None:
        return self._queue.get()

    def close(self) -> None:
        self._queue.put(None)


class SocketLink:
    """Between two processes, in one direction; messages are written or read in a thread, while the stages compute."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._sent: queue.SimpleQueue[StagePass | None] = queue.SimpleQueue()
        self._received: queue.SimpleQueue[StagePass | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._broken = False
        self._lock = threading.Lock()

    def send(self, message: StagePass) -> None:
        if self._broken:
            raise StageLost("the next stage has ended")
        self._start(self._write)
        self._sent.put(message)

    def receive(self) -> StagePass | None:
        self._start(self._read)
        return self._received.get()

    def close(self) -> None:
        self._sent.put(None)
        with contextlib.suppress(OSError):
            if not any(thread.name == self._write.__name__ for thread in self._threads):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _start(self, target: object) -> None:
        with self._lock:
            name = target.__name__  # pyright: ignore[reportAttributeAccessIssue]
            if all(thread.name != name for thread in self._threads):
                thread = threading.Thread(target=target, name=name, daemon=True)  # pyright: ignore[reportArgumentType]
                self._threads.append(thread)
                thread.start()

    def _write(self) -> None:
        try:
            while (message := self._sent.get()) is not None:
                for buffer in encode(message):
                    self._socket.sendall(buffer)
        except OSError:
            self._broken = True
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        try:
            while True:
                head = _exactly(self._socket, torch.empty(8, dtype=torch.uint8))
                length = int.from_bytes(bytes(head.numpy()), "little")
                header = bytes(_exactly(self._socket, torch.empty(length, dtype=torch.uint8)).numpy())
                buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes_of(header)]
                self._received.put(decode(header, [_exactly(self._socket, buffer) for buffer in buffers]))
        except OSError:
            self._end()
            self._received.put(None)


def _exactly(connection: socket.socket, target: Tensor) -> Tensor:
    """Fill the buffer. Raises OSError if the other side ends."""
    view = target.numpy().data
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError
        view = view[count:]
    return target


class StageListener:
    """Accepts the connection of the stage before; only one that knows the secret of this replica is accepted.

    Args:
        host: the address of this node that other stages can reach.
    """

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._socket = socket.create_server((host, 0))
        self._socket.settimeout(CONNECT_S)
        self.address: tuple[str, int] = (host, self._socket.getsockname()[1])

    def accept(self) -> SocketLink:
        """Wait for the stage before. Raises StageLost if it does not come."""
        try:
            while True:
                connection, _ = self._socket.accept()
                connection.settimeout(CONNECT_S)
                try:
                    given = bytes(_exactly(connection, torch.empty(SECRET_BYTES, dtype=torch.uint8)).numpy())
                except OSError:
                    given = b""
                if hmac.compare_digest(given, self._secret):
                    connection.settimeout(None)
                    return SocketLink(connection)
                connection.close()
        except OSError as error:
            raise StageLost(f"no stage connected within {CONNECT_S:g} s") from error
        finally:
            self._socket.close()


def connect(address: tuple[str, int], secret: bytes) -> SocketLink:
    """Connect to the next stage. Raises StageLost if it does not answer."""
    try:
        connection = socket.create_connection(address, CONNECT_S)
        connection.sendall(secret)
        connection.settimeout(None)
    except OSError as error:
        raise StageLost(f"the stage at {address[0]}:{address[1]} does not answer: {error}") from error
    return SocketLink(connection)
