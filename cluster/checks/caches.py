"""The folders in which compilers keep kernels between runs: where they are and how large."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.checks.preflight import CheckResult

#: Files that are counted in one folder: a look at more would take seconds.
COUNTED_AT_MOST = 20_000


def kernel_caches(environ: Mapping[str, str] | None = None) -> dict[str, Path]:
    """What compiles -> its folder, as its own variable or else its default says."""
    environ = os.environ if environ is None else environ
    home = Path(environ.get("HOME") or tempfile.gettempdir())
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    return {
        "torch.compile": Path(environ.get("TORCHINDUCTOR_CACHE_DIR") or inductor),
        "Triton": Path(environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        "CUDA": Path(environ.get("CUDA_CACHE_PATH") or home / ".nv" / "ComputeCache"),
    }


def check_caches(runtime: str | None, *, environ: Mapping[str, str] | None = None) -> CheckResult:
    """The versions that kernels are compiled for, and what is kept of earlier compilations.

    Args:
        runtime: of the devices, such as "CUDA 12.8".
    """
    sizes = {name: (folder, _size(folder)) for name, folder in kernel_caches(environ).items()}
    known = [f"{name} {size / 2**20:.1f} MiB in {folder}" for name, (folder, size) in sizes.items() if size is not None]
    kept = ", ".join(known)
    seen = f"{runtime or 'no CUDA'}; kept: {kept or 'nothing'}"
    return CheckResult("kernel_caches", "ok", seen, "any; a folder may be deleted, and kernels are compiled again")


def _size(folder: Path) -> int | None:
    """Bytes of the files in a folder; None without one."""
    if not folder.is_dir():
        return None
    sizes = (size for _, size in zip(range(COUNTED_AT_MOST), _sizes(folder), strict=False))
    return sum(sizes)


def _sizes(folder: Path) -> Iterator[int]:
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.lstat(os.path.join(place, name)).st_size
            except OSError:  # deleted since
                continue
