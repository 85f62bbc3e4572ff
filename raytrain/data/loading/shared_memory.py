"""Send a batch to another process: its tensors in memory that both map, everything else through the pipe.

torch's own way (`torch.multiprocessing`) has each tensor fetched from a thread of the process that made it. That thread
must take the interpreter from the item that is read next, several times for each tensor, up to 5 ms each time if the
item computes in Python: 10 ms for a batch of two tensors, in which training waits. Here one open file follows
the message through the pipe (SCM_RIGHTS), sent by the thread that read the batch, and nothing is fetched later. The
memory is an anonymous file (memfd), so that the size of /dev/shm does not matter, and is freed with the last
tensor in it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raytrain.data.transfer import dense, rebuild

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
    """Send `head` and a value of any nesting.

    Raises:
        BrokenPipeError, ConnectionResetError: the other end has closed the pipe.
        OSError: no memory is left.
        Exception: what Python raises of an object that cannot be sent; nothing was.
    """
    parts: list[tuple[int, np.ndarray]] = []
    rest = _apart(value, parts)
    end = _end(parts)
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
    """The next (head, value) of a line; tensors lie in the memory that came with it, which goes with the last of them.

    Raises:
        EOFError, OSError: the other end is gone.
    """
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
    if type(value) is not Tensor or not _is_plain(value):
        return value if isinstance(value, PackedSequence) else rebuild(value, partial(_apart, parts=parts))
    tensor = dense(value)
    last = not tensor.is_contiguous()  # then it is in an order of channels that `dense` leaves alone
    tensor = tensor.movedim(1, -1) if last else tensor
    parts.append((_end(parts), tensor.reshape(-1).view(torch.uint8).numpy()))
    return _Part(parts[-1][0], tensor.dtype, tuple(tensor.shape), last)


def _together(value: Any, memory: Any) -> Any:
    if not isinstance(value, _Part):
        return value if isinstance(value, PackedSequence) else rebuild(value, partial(_together, memory=memory))
    tensor = torch.empty(0, dtype=value.dtype)  # not a view: each counts the writes to itself alone
    tensor.set_(memory, value.begin // tensor.element_size(), value.shape)  # pyright: ignore[reportCallIssue]
    return tensor.movedim(-1, 1) if value.last else tensor


def _end(parts: list[tuple[int, np.ndarray]]) -> int:
    if not parts:
        return 0
    begin, part = parts[-1]
    return begin + part.nbytes + -part.nbytes % ALIGNED


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes, type and shape are all there is to it; others (sparse, quantized) are sent as torch does."""
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    return plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
