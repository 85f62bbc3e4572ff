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
from typing import Any

from torch import Tensor, nn

from cluster.wording import size

#: Tensors in the warning, and in its file.
NAMED, LISTED = 3, 20


@dataclass(frozen=True)
class HeldTensor:
    """The memory of a tensor; of several that share it, of the largest."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    bytes: int  # of the memory as a whole
    holder: str  # its name in the training; "" if it is none of the training's own

    def describe(self) -> str:
        return f"{size(self.bytes)} {self.dtype} {list(self.shape)}{', ' if self.holder else ''}{self.holder}"


def largest_tensors(session: Any = None) -> list[HeldTensor]:
    """The tensors of this process that take most memory, those of its `Session` by name; the largest first. Memory that
    only autograd holds, such as saved activations, has no Python object and is not found. Takes a tenth of a second in
    a process with a million objects."""
    kind = "cpu" if session is None else session.device.type
    by_memory: dict[int, Tensor] = {}
    for one in gc.get_objects():
        if not issubclass(type(one), Tensor):
            continue
        with contextlib.suppress(Exception):  # a tensor without memory, such as a fake one
            total = one.untyped_storage().nbytes()
            if one.device.type == kind and total:
                place = one.untyped_storage().data_ptr()
                other = by_memory.get(place)
                if other is None or other.nbytes < one.nbytes <= total:  # an overlapping view is larger than its memory
                    by_memory[place] = one
    names = _names(session)
    order = sorted(by_memory.items(), key=lambda item: -item[1].untyped_storage().nbytes())
    return [
        HeldTensor(
            tuple(one.shape), str(one.dtype).removeprefix("torch."), str(one.device), one.untyped_storage().nbytes(),
            names.get(place, ""),
        )
        for place, one in order[:LISTED]
    ]  # fmt: skip


def _names(session: Any) -> dict[int, str]:
    """Address of memory -> what the tensor in it is for the training, the first of several."""
    found: dict[int, str] = {}

    def add(name: str, value: Any) -> None:
        local = getattr(value, "_local_tensor", value)  # of a DTensor
        if isinstance(local, Tensor):
            with contextlib.suppress(Exception):
                found.setdefault(local.untyped_storage().data_ptr(), name)

    module: nn.Module | None = getattr(getattr(session, "trainable", None), "module", None)
    if module is None:
        return found
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        names[id(parameter)] = name
        add(f"parameter {name}", parameter)
        add(f"gradient {name}", parameter.grad)
    for name, buffer in module.named_buffers():
        add(f"buffer {name}", buffer)
    for optimizer in getattr(session, "optimizers", ()):
        for parameter, state in list(optimizer.state.items()):
            for key, value in list(state.items()):
                add(f"optimizer state {key} of {names.get(id(parameter), 'a parameter')}", value)
    return found


@dataclass(frozen=True)
class SoftLimitWarning:
    text: str  # one sentence with the figures and what to change
    figures: dict[str, Any]  # its numbers, and the tensors
    tensors: Sequence[HeldTensor]


class SoftLimit:
    """Compares the memory of this process with a limit; warns once.

    Args:
        limit: bytes, or None as long as they are unknown; asked until they are known.
        tensors: the largest ones; called when the warning is due.
        who: this process, for the text: `rank 1 (pid 77) on node-1`.
    """

    def __init__(
        self, *, limit: Callable[[], int | None], used: Callable[[], int], tensors: Callable[[], list[HeldTensor]],
        who: str,
    ) -> None:  # fmt: skip
        self._limit_of, self._used, self._tensors, self._who = limit, used, tensors, who
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
            f"{self._who} uses {size(used)} of memory, more than {size(self._limit)} (cluster.memory_soft_limit), and "
            f"its largest tensors are {named}: lower loop.micro_batch_size, set loop.activation_checkpointing, or do "
            "not keep what is not needed"
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
    return "".join(f"{one.describe()} on {one.device}\n" for one in tensors)
