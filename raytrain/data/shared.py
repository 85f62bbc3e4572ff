"""A batch from one process to another: its tensors in memory that both map, everything else down the line.

torch's own way (`torch.multiprocessing`) has each tensor fetched from a thread of the process that made it. That thread
must win the interpreter from the item that is read next, several times for each tensor, up to 5 ms each time where the
item computes in Python: 10 ms for a batch of two tensors, in which training waits. Here one open file goes down the
line after the message (SCM_RIGHTS), from the thread that read the batch, and nobody is asked for anything later. The
memory is an anonymous file (memfd), so that the size of /dev/shm does not matter, and is given back with the last
tensor in it.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
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
        BrokenPipeError, ConnectionResetError: the other end is gone.
        OSError: no memory is left.
        Exception: what Python raises of an object that cannot be sent; nothing was.
    """
    parts: list[np.ndarray] = []
    end = 0

    def apart(part: Any) -> Any:
        nonlocal end
        if type(part) is not Tensor or not _is_plain(part):
            return part if isinstance(part, PackedSequence) else rebuild(part, apart)
        tensor = dense(part)
        last = not tensor.is_contiguous()  # then it is in an order of channels that `dense` leaves alone
        tensor = tensor.movedim(1, -1) if last else tensor
        parts.append(tensor.reshape(-1).view(torch.uint8).numpy())
        stands = _Part(end, tensor.dtype, tuple(tensor.shape), last)
        end += parts[-1].nbytes + -parts[-1].nbytes % ALIGNED
        return stands

    rest = apart(value)
    if not end:
        line.send((head, rest, 0))
        return
    with open(os.memfd_create("batch", os.MFD_CLOEXEC), "wb") as file:
        for part in parts:
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
    memory: Any = b""
    if size:
        descriptor = recv_handle(line)
        try:
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def together(part: Any) -> Any:
        if not isinstance(part, _Part):
            return part if isinstance(part, PackedSequence) else rebuild(part, together)
        count = int(np.prod(part.shape, dtype=np.int64))
        tensor = torch.empty(0, dtype=part.dtype)
        if count:
            tensor = torch.frombuffer(memory, dtype=part.dtype, count=count, offset=part.begin)
        tensor = tensor.reshape(part.shape)
        return tensor.movedim(-1, 1) if part.last else tensor

    return head, together(rest)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes, type and shape are all there is to it; others (sparse, quantized) are sent as torch does."""
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    return plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
