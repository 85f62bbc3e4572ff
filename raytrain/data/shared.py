"""A batch from one process to another: its tensors in memory that both map, everything else down the line.

torch's own way (`torch.multiprocessing`) has each tensor fetched from a thread of the process that made it. That thread
must win the interpreter from the item that is read next, several times for each tensor, 5 ms each time where the item
computes in Python: a reader then costs more than it hides. Here one open file goes down the line after the message
(SCM_RIGHTS), from the thread that read the batch, and nobody is asked for anything later. The memory is an anonymous
file (memfd), so that the size of /dev/shm does not matter, and is given back with the last tensor in it.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raytrain.data.transfer import dense

#: Where each tensor begins in the memory: a multiple of this.
ALIGNED = 64


class Packed(NamedTuple):
    """A value taken apart: `message` is a pickle without the bytes of its tensors, `parts` are those, one by one."""

    message: bytes
    parts: list[memoryview]


def pack(value: Any) -> Packed:
    """Take a value apart. Raises what pickle raises of a value that cannot be sent."""
    parts: list[memoryview] = []
    message = io.BytesIO()

    def apart(buffer: pickle.PickleBuffer) -> None:
        parts.append(buffer.raw())

    _Pickler(message, protocol=5, buffer_callback=apart).dump(value)
    return Packed(message.getvalue(), parts)


def send(line: Connection, head: Any, packed: Packed) -> None:
    """Send `head` and a value that was packed. Raises OSError where nobody takes it, or no memory is left."""
    sizes = [part.nbytes for part in packed.parts]
    if not sum(sizes):
        line.send((head, packed.message, sizes))
        return
    descriptor = os.memfd_create("batch", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as file:
        for part in packed.parts:
            file.write(part)
            file.write(bytes(-part.nbytes % ALIGNED))
        file.flush()
        line.send((head, packed.message, sizes))
        send_handle(line, descriptor, None)


def receive(line: Connection) -> tuple[Any, Packed]:
    """The next (head, value still packed) of a line. Raises EOFError or OSError where the other end is gone."""
    head, message, sizes = line.recv()
    if not sum(sizes):
        return head, Packed(message, [memoryview(b"") for _ in sizes])
    descriptor = recv_handle(line)
    try:
        memory = memoryview(mmap.mmap(descriptor, 0))  # each tensor holds it; closed with the last of them
    finally:
        os.close(descriptor)
    parts, at = [], 0
    for size in sizes:
        parts.append(memory[at : at + size])
        at += size + -size % ALIGNED
    return head, Packed(message, parts)


def unpack(packed: Packed) -> Any:
    """The value; its tensors lie in the memory that came with it."""
    return pickle.loads(packed.message, buffers=packed.parts)


class _Pickler(pickle.Pickler):
    """Takes the bytes of plain tensors apart; others (sparse, of a class of their own) are pickled as torch does it."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        tensor = dense(value)
        last = not tensor.is_contiguous()  # channels are the last dimension in memory (see `dense`)
        tensor = tensor.movedim(1, -1) if last else tensor
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw), tensor.dtype, tuple(tensor.shape), last)


def _is_plain(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    return plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...], last: bool) -> Tensor:
    tensor = torch.frombuffer(raw, dtype=dtype) if len(memoryview(raw)) else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(shape)
    return tensor.movedim(-1, 1) if last else tensor
