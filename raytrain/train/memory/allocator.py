"""Tunes the C allocator (glibc): keep freed memory for the next step, or return it to the kernel at once."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**30
#: The largest value that glibc accepts for the heaps of threads other than the main one; Ray trains in such a thread.
MAPPED_BYTES = 2**25
#: Larger blocks return to the kernel when they are freed, so that the resident set equals the memory in use.
EXACT_BYTES = 2**16
#: The threshold set last in this process: glibc cannot be queried.
_last_set: dict[str, int] = {}


def keep_freed_memory() -> bool:
    """Make glibc keep up to 1 GiB of freed memory instead of returning it to the kernel after every step.

    Otherwise a small GPT on a CPU took 500 page faults per step, 3 % of its time. Settings in the environment
    (`MALLOC_*`, `GLIBC_TUNABLES`) take precedence; other C libraries are left unchanged.

    Returns:
        Whether it was set.
    """
    return _set_thresholds(trim=KEPT_BYTES, mapped=MAPPED_BYTES)


def give_back_freed_memory() -> bool:
    """Make glibc return freed memory to the kernel at once, for runs whose step needs most of the memory.

    Returns:
        Whether it was set; the environment takes precedence here too.
    """
    exact = _set_thresholds(trim=EXACT_BYTES, mapped=EXACT_BYTES)
    give_back_free_pages()
    return exact


def give_back_free_pages() -> None:
    """Return all unused heap pages to the kernel, once.

    Needed whatever the thresholds are: a smaller step reuses chunks left by a larger one, and their pages then stay.
    """
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def freed_at_once() -> Iterator[bool]:
    """Context in which freed memory returns to the kernel at once, so that the peak of the resident set measures memory
    in use.

    On exit, restores the earlier setting, or that of `keep_freed_memory`. It slows the process: do not time inside.

    Yields:
        Whether it is in effect; the environment takes precedence here too.
    """
    already = _last_set.get("trim") == EXACT_BYTES
    exact = give_back_freed_memory()
    try:
        yield exact
    finally:
        if exact and not already:
            keep_freed_memory()


def _set_thresholds(*, trim: int, mapped: int) -> bool:
    if any(name.startswith("MALLOC_") for name in os.environ) or _users_tunables():
        return False
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    _last_set["trim"] = trim
    return bool(mallopt(_M_TRIM_THRESHOLD, trim)) and bool(mallopt(_M_MMAP_THRESHOLD, mapped))


def _users_tunables() -> bool:
    """Whether `GLIBC_TUNABLES` sets anything of the allocator besides the caches of threads, which are off in the
    processes of raytrain's own clusters (`cluster.environment.UNCACHED`)."""
    given = [one.partition("=")[0] for one in os.environ.get("GLIBC_TUNABLES", "").split(":")]
    return any(name.startswith("glibc.malloc.") and name != "glibc.malloc.tcache_count" for name in given)


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library by name; None if it does not exist."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None


def release_cached(device: torch.device) -> None:
    """Release what the device's allocator, or on a CPU the C library, has cached."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_free_pages()
