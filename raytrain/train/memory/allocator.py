"""The C allocator of a training process: what a step frees, the next step takes again; but not while it is measured."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**30
#: glibc takes no more for the heaps of other threads than the main one, in which Ray trains.
MAPPED_BYTES = 2**25
#: Whatever is larger is given back to the kernel as it is freed, so that the resident set is what is in use.
EXACT_BYTES = 2**16
#: What glibc was told last, of this process: it cannot be asked.
_told: dict[str, int] = {}


def keep_freed_memory() -> bool:
    """Have glibc keep up to 1 GiB of freed memory instead of giving it back to the kernel after every step.

    A small GPT on a CPU took 500 page faults a step otherwise, 3 % of its time. What the environment says about it
    (`MALLOC_*`, `GLIBC_TUNABLES`) wins; another C library is left alone.

    Returns:
        whether it was set.
    """
    return _set_thresholds(trim=KEPT_BYTES, mapped=MAPPED_BYTES)


def give_back_freed_memory() -> bool:
    """Have glibc give freed memory back to the kernel at once, so that the process takes what it uses and no more: for
    a run whose step needs most of what there is. Returns whether it was set; the environment wins here too."""
    exact = _set_thresholds(trim=EXACT_BYTES, mapped=EXACT_BYTES)
    give_back_free_pages()
    return exact


def give_back_free_pages() -> None:
    """Give back, once, every page of the heap that nothing uses: chunks that an earlier, larger step has left there are
    taken again by a smaller one, and whatever the thresholds say, their pages then stay."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def freed_at_once() -> Iterator[bool]:
    """Inside, freed memory goes back to the kernel at once, so that a peak of the resident set is one of memory in
    use; afterwards as before, or as `keep_freed_memory` says. Slower: nothing is timed inside.

    Yields:
        whether it was so; what the environment says wins here too.
    """
    spared = _told.get("trim") == EXACT_BYTES
    exact = give_back_freed_memory()
    try:
        yield exact
    finally:
        if exact and not spared:
            keep_freed_memory()


def _set_thresholds(*, trim: int, mapped: int) -> bool:
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return False
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    _told["trim"] = trim
    return bool(mallopt(_M_TRIM_THRESHOLD, trim)) and bool(mallopt(_M_MMAP_THRESHOLD, mapped))


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library; None where it has no such."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
