"""Cores, memory and CPU flags of machines laid out in a temporary directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.devices.limits import cpu_description, cpu_quota, memory_bytes, oom_kills, usable_cores

MEMINFO = "MemTotal:  16000000 kB\nMemFree:  1000000 kB\nMemAvailable:  8000000 kB\n"


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_quota_the_affinity_mask_counts(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert usable_cores(root=tmp_path, affinity=6) == (6, "6 cores in the affinity mask")


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2), ("50000", 1), ("900000", 4)])
def test_cgroup_v2_quota_cuts_cores(tmp_path: Path, quota: str, cores: int) -> None:
    lay(tmp_path, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": f"{quota} 100000\n"})
    assert usable_cores(root=tmp_path, affinity=4)[0] == cores


def test_the_narrowest_of_nested_cgroups_counts(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n",
        },
    )
    assert cpu_quota(root=tmp_path) == 1.5


def test_cgroup_v1_quota_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    """In a container the path of /proc/self/cgroup is not mounted; the mount is the container's group."""
    lay(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(root=tmp_path) == 3.0


def test_unlimited_v1_quota_is_none(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "proc/self/cgroup": "2:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(root=tmp_path) is None


def test_memory_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})
    lay(tmp_path, {"sys/fs/cgroup/memory.max": "max\n"})
    assert memory_bytes(root=tmp_path) == (16_000_000 * 1024, 8_000_000 * 1024)


def test_memory_limit_v2_counts_page_cache_as_free(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.max": "1000000000\n",
            "sys/fs/cgroup/a/memory.current": "700000000\n",
            "sys/fs/cgroup/a/memory.stat": "anon 300000000\ninactive_file 400000000\n",
        },
    )
    assert memory_bytes(root=tmp_path) == (1_000_000_000, 700_000_000)


def test_memory_limit_v1_and_its_unlimited_value(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:memory:/x\n"}
    lay(tmp_path, {**files, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert memory_bytes(root=tmp_path)[0] == 16_000_000 * 1024
    lay(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000000\n"})
    lay(tmp_path, {"sys/fs/cgroup/memory/memory.usage_in_bytes": "500000000\n"})
    assert memory_bytes(root=tmp_path) == (2_000_000_000, 1_500_000_000)


@pytest.mark.parametrize(
    ("text", "model", "has"),
    [
        ("model name\t: Xeon\nflags\t: fpu amx_bf16 avx512_bf16\n", "Xeon", {"amx_bf16", "avx512_bf16"}),
        ("model name\t: EPYC\nflags\t: fpu avx2\n", "EPYC", set()),
        ("Features\t: fp asimd bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n",
         "ARM implementer 0x41 part 0xd40", {"arm_bf16"}),
    ],
)  # fmt: skip
def test_cpu_model_and_bf16_flags(tmp_path: Path, text: str, model: str, has: set[str]) -> None:
    seen, flags = cpu_description(root=lay(tmp_path, {"proc/cpuinfo": text}))
    assert seen == model
    assert {name for name, present in flags.items() if present} == has


def test_a_machine_without_proc_has_no_known_limits(tmp_path: Path) -> None:
    assert cpu_quota(root=tmp_path) is None
    assert memory_bytes(root=tmp_path) == (0, 0)


def test_what_the_kernel_killed_for_memory_is_read_of_the_innermost_cgroup_else_of_the_machine(tmp_path: Path) -> None:
    assert oom_kills(root=tmp_path) is None
    lay(tmp_path, {"proc/self/cgroup": "4:memory:/pod\n0::/\n", "proc/vmstat": "oom_kill 7\n"})
    assert oom_kills(root=tmp_path) == 7
    lay(tmp_path, {"sys/fs/cgroup/memory/pod/memory.oom_control": "under_oom 0\noom_kill 2\n"})
    assert oom_kills(root=tmp_path) == 2
    lay(tmp_path, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.events": "oom 5\noom_kill 3\n"})
    assert oom_kills(root=tmp_path) == 3
