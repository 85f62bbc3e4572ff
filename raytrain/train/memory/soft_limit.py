"""Warns once when this process uses more memory than a soft limit, and names its largest tensors.

A thread compares one number with the limit; tensors are looked for only when the warning is due. The training thread
takes no part, and nothing is asked of a device for it.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from raytrain.trainable import MicroBatch

#: Tensors in the warning, and in its file.
NAMED, LISTED = 3, 20
OF_MANY = {
    "parameter": "parameters", "gradient": "gradients", "optimizer state": "optimizer states", "buffer": "buffers",
    "batch": "batches",
}  # fmt: skip


@dataclass(frozen=True)
class HeldTensor:
    """The memory of one tensor, or of several that share it.

    Attributes:
        shape, dtype, device: of the largest of them.
        bytes: of the memory as a whole.
        holder: what it is for the training, else which object holds it.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int
    holder: str

    def describe(self) -> str:
        """As text: `191 MiB float32 [50000000], gradient layers.0.weight`."""
        return f"{_size(self.bytes)} {self.dtype} {list(self.shape)}, {self.holder}"


class Trained(Protocol):
    """What a session has once it is prepared; before, some of it is missing."""

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        ...


def largest_tensors(session: Trained | None = None, *, count: int = LISTED) -> list[HeldTensor]:
    """The tensors of this process that take most memory, those of the training by name; the largest first.

    Takes a tenth of a second in a process with a million objects. Memory that only autograd holds, such as saved
    activations, has no Python object and is not found.

    Args:
        session: the `Session` of this process; None: nothing is known by name.
    """
    kind = "cpu" if session is None else session.device.type
    by_memory: dict[int, list[Tensor]] = {}
    batches: list[MicroBatch] = []
    for one in gc.get_objects():
        if issubclass(type(one), MicroBatch):
            batches.append(one)
        elif issubclass(type(one), Tensor):
            with contextlib.suppress(Exception):  # a tensor without memory, such as a fake one
                if one.device.type == kind and one.untyped_storage().nbytes():
                    by_memory.setdefault(one.untyped_storage().data_ptr(), []).append(one)
    names = _names(session, batches)
    order = sorted(by_memory.items(), key=lambda item: -item[1][0].untyped_storage().nbytes())
    return [_held(tensors, names.get(place)) for place, tensors in order[:count]]


def _held(tensors: list[Tensor], named: list[tuple[str, str]] | None) -> HeldTensor:
    total = tensors[0].untyped_storage().nbytes()
    largest = max(tensors, key=lambda one: one.nbytes * (one.nbytes <= total))  # an overlapping view says more
    if named is None:
        holder = _holder_of(largest, apart=tensors)
    elif len(named) == 1:
        holder = " ".join(named[0])
    else:
        holder = f"{OF_MANY[named[0][0]]} of {len(named)} tensors, the first {named[0][1]}"
    shape, dtype = tuple(largest.shape), str(largest.dtype).removeprefix("torch.")
    return HeldTensor(shape, dtype, str(largest.device), total, holder)


def _names(session: Any, batches: Sequence[MicroBatch]) -> dict[int, list[tuple[str, str]]]:
    """Address of memory -> (kind, name) of each tensor of the training in it."""
    found: dict[int, list[tuple[str, str]]] = {}

    def add(kind: str, name: str, value: Any) -> None:
        local = getattr(value, "_local_tensor", value)  # of a DTensor
        if isinstance(local, Tensor):
            with contextlib.suppress(Exception):
                found.setdefault(local.untyped_storage().data_ptr(), []).append((kind, name))

    module: nn.Module | None = getattr(getattr(session, "trainable", None), "module", None)
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters() if module is not None else ():
        names[id(parameter)] = name
        add("parameter", name, parameter)
        add("gradient", name, parameter.grad)
    for name, buffer in module.named_buffers() if module is not None else ():
        add("buffer", name, buffer)
    for optimizer in getattr(session, "optimizers", ()):
        for parameter, state in list(optimizer.state.items()):
            for key, value in list(state.items()):
                add("optimizer state", f"{key} of {names.get(id(parameter), 'a parameter')}", value)
    for one in batches:
        for key, value in one.batch.items():
            add("batch", key, value)
    return found


def _holder_of(tensor: Tensor, *, apart: list[Tensor]) -> str:
    """Which Python object refers to a tensor that is none of the training's own."""
    place = id(tensor)  # a comprehension that named the tensor itself would be one more that refers to it
    for holder in gc.get_referrers(tensor):
        if holder is apart or type(holder).__name__ in ("frame", "list_iterator", "generator"):
            continue
        if isinstance(holder, dict):
            (key,) = [key for key, value in list(holder.items()) if id(value) == place] or ["?"]
            if "__name__" in holder and "__builtins__" in holder:
                return f"global {key} of {holder['__name__']}"
            owner = next((one for one in gc.get_referrers(holder) if _attributes(one) is holder), None)
            return f"key {key!r} of a dict" if owner is None else f"attribute {key} of {type(owner).__name__}"
        if isinstance(holder, list | tuple | set):
            return f"a {type(holder).__name__} of {len(holder)}"
        return type(holder).__name__
    return "a local variable, or autograd"


def _attributes(one: object) -> dict[str, Any] | None:
    """The attributes of an object, without calling any code of its class."""
    try:
        return object.__getattribute__(one, "__dict__")
    except AttributeError:  # a dict, or an object with slots
        return None


@dataclass(frozen=True)
class SoftLimitWarning:
    """The warning.

    Attributes:
        text: one sentence with the figures and what to change.
        figures: its numbers, and the tensors.
    """

    text: str
    figures: dict[str, Any]
    tensors: Sequence[HeldTensor]


class SoftLimit:
    """Compares the memory of this process with a limit; warns once.

    Args:
        limit: bytes, or None as long as they are unknown; asked until they are known.
        used: bytes in use.
        tensors: the largest tensors; called when the warning is due.
        who: this process, for the text: `rank 1 (pid 77) on node-1`.
        key: the key of the job that holds the limit.
    """

    def __init__(
        self, *, limit: Callable[[], int | None], used: Callable[[], int], tensors: Callable[[], list[HeldTensor]],
        who: str, key: str = "cluster.memory_soft_limit",
    ) -> None:  # fmt: skip
        self._limit_of, self._used, self._tensors, self._who, self._key = limit, used, tensors, who, key
        self._limit: int | None = None
        self.warned = False

    def look(self) -> SoftLimitWarning | None:
        """The warning, the first time that more is in use than the limit."""
        self._limit = self._limit or self._limit_of()
        used = self._used()
        if self.warned or self._limit is None or used <= self._limit:
            return None
        self.warned = True
        try:
            tensors = self._tensors()
        except RuntimeError:  # the training thread added a parameter or a state meanwhile
            tensors = []
        named = "; ".join(one.describe() for one in tensors[:NAMED]) or "not known"
        text = (
            f"{self._who} uses {_size(used)} of memory, more than {_size(self._limit)} ({self._key}), and its largest "
            f"tensors are {named}: lower loop.micro_batch_size, set loop.activation_checkpointing, or do not keep what "
            "is not needed"
        )
        figures = {"used": used, "total": self._limit, "tensors": [asdict(one) for one in tensors]}
        return SoftLimitWarning(text, figures, tensors)


@contextlib.contextmanager
def watched_memory(
    watch: SoftLimit, *, every: float, warn: Callable[[SoftLimitWarning], None]
) -> Iterator[threading.Thread | None]:
    """Context manager in which a thread looks every `every` seconds, until it has warned; 0: never."""
    if not every:
        yield None
        return
    over = threading.Event()

    def look() -> None:
        while not over.wait(every) and not watch.warned:
            found = watch.look()
            if found is not None:
                warn(found)

    thread = threading.Thread(target=look, daemon=True, name="memory-soft-limit")
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join(1.0)


def table(tensors: Sequence[HeldTensor]) -> str:
    """The tensors as text, one a line."""
    return "".join(f"{one.describe()} on {one.device}\n" for one in tensors)


def _size(size: float) -> str:
    if size >= 2**30:
        return f"{size / 2**30:,.1f} GiB"
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size / 2**10:,.0f} KiB"
