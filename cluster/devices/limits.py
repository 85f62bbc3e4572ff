"""Resources that this process may use: cores, memory and CPU features, read from /proc and cgroups.

Every function takes `root`, the directory to use as ``/``, so that tests can imitate other machines in a temporary
directory.
"""

from __future__ import annotations

import os
from pathlib import Path

from cluster.wording import counted

ROOT = Path("/")
BF16_FLAGS = ("amx_bf16", "avx512_bf16", "arm_bf16")
_OOM_FILES = ("memory.events", "memory.oom_control")
_UNLIMITED_V1 = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page


def usable_cores(*, root: Path = ROOT, affinity: int | None = None) -> tuple[int, str]:
    """The number of cores that this process may use, and the reason: the affinity mask, or a lower cgroup CPU quota."""
    count = affinity
    if count is None:
        count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS
    quota = cpu_quota(root=root)
    if quota is not None and quota < count:
        return max(1, int(quota)), f"a cgroup quota of {quota:g} of {counted(count, 'core')}"
    return count, f"{counted(count, 'core')} in the affinity mask"


def cpu_quota(*, root: Path = ROOT) -> float | None:
    """The smallest CPU quota, in cores, of the cgroups (v1 or v2) from this process up to the root; None: no limit."""
    quotas = []
    for folder in _cgroup_folders(root, controller="cpu"):
        v2 = _words(folder / "cpu.max")
        v1 = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        for words in (v2, v1):
            if len(words) == 2 and words[0] not in ("max", "-1") and float(words[1]) > 0:
                quotas.append(float(words[0]) / float(words[1]))
    return min(quotas, default=None)


def memory_bytes(*, root: Path = ROOT) -> tuple[int, int]:
    """(total, free) bytes that this process may use: the memory of the machine, or a lower cgroup limit.

    Page cache that the kernel can reclaim counts as free.
    """
    info = _meminfo(root)
    total = info.get("MemTotal", 0)
    free = info.get("MemAvailable", info.get("MemFree", total))
    for folder in _cgroup_folders(root, controller="memory"):
        limit, used = _cgroup_memory(folder)
        if limit is not None:
            total = min(total, limit) if total else limit
            free = min(free, max(0, limit - used)) if free else max(0, limit - used)
    return total, free


def machine_memory(*, root: Path = ROOT) -> int | None:
    """Bytes of the whole machine's memory, whatever a cgroup allows; None where /proc does not tell."""
    return _meminfo(root).get("MemTotal")


def oom_kills(*, root: Path = ROOT) -> int | None:
    """How many processes the kernel has killed for their memory in this process's cgroup, or on the whole machine where
    its cgroup does not count them; None: unknown."""
    files = [folder / name for folder in _cgroup_folders(root, controller="memory") for name in _OOM_FILES]
    for path in [*files, root / "proc/vmstat"]:
        for line in text_of(path).splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def cpu_description(*, root: Path = ROOT) -> tuple[str, dict[str, bool]]:
    """(model name, {flag: present} for each of BF16_FLAGS) from /proc/cpuinfo, x86 and ARM."""
    fields: dict[str, str] = {}
    for line in text_of(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    words = set(fields.get("flags", "").split())
    features = set(fields.get("features", "").split())
    flags = {"amx_bf16": "amx_bf16" in words, "avx512_bf16": "avx512_bf16" in words, "arm_bf16": "bf16" in features}
    model = fields.get("model name") or fields.get("cpu model")
    if not model and "cpu part" in fields:  # on ARM, cpuinfo has numbers instead of a name
        model = f"ARM implementer {fields.get('cpu implementer', '?')} part {fields['cpu part']}"
    return model or os.uname().machine, flags


def _cgroup_memory(folder: Path) -> tuple[int | None, int]:
    """(limit or None, bytes in use that cannot be reclaimed) of one cgroup folder."""
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        words = _words(folder / limit_name)
        if not words or words[0] == "max" or int(words[0]) >= _UNLIMITED_V1:
            continue
        used = int((_words(folder / used_name) or ["0"])[0])
        stat = dict(line.split()[:2] for line in text_of(folder / "memory.stat").splitlines() if " " in line)
        return int(words[0]), max(0, used - int(stat.get(cache_name, 0)))
    return None, 0


def _cgroup_folders(root: Path, *, controller: str) -> list[Path]:
    """Folders that may limit this process, innermost first, for cgroup v2 and for one v1 controller.

    In a container the path in /proc/self/cgroup is often that of the host and does not exist. Its parents do, up to the
    mount itself, which is then the container's own cgroup.
    """
    folders: list[Path] = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = mount / path.strip("/")
        folders += [inner, *(parent for parent in inner.parents if parent.is_relative_to(mount))]
    return [folder for folder in folders if folder.is_dir()]


def _meminfo(root: Path) -> dict[str, int]:
    rows = (line.split() for line in text_of(root / "proc/meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) >= 2}


def _words(path: Path) -> list[str]:
    return text_of(path).split()


def text_of(path: Path) -> str:
    """The text of a file; empty if it is missing or unreadable, since both mean that nothing is known."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
