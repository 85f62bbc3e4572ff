"""The checks that look at several nodes, or at several devices: versions, clocks, rates."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.checks.preflight import CheckResult
from cluster.wording import counted
from jobs.checks.node import WATCHED, DeviceRates, NodeReport

#: The oldest versions that raytrain runs on, as in pyproject.toml.
OLDEST = {"python": (3, 11), "torch": (2, 9), "ray": (2, 60)}
OLDEST_CUDA, OLDEST_ROCM = (11, 8), (6, 2)
#: A device below this share of the median of its kind is slow.
SLOW = 0.85
#: Clocks further apart confuse the order of events of several nodes.
CLOCK_S = 1.0
#: Telemetry sees an allocation if its reading rises by this much of it: the driver and others may add to it.
MONITORED = (0.9, 1.5)


def check_versions(reports: Mapping[str, NodeReport]) -> list[CheckResult]:
    """Whether each node has the packages, new enough, and all nodes the same."""
    results = []
    for name, oldest in OLDEST.items():
        found = {node: _version(report, name) for node, report in reports.items()}
        key, expected = name, f"{_shown(oldest)} or newer, the same on every node"
        seen = _by_value({node: version or "not installed" for node, version in found.items()})
        old = [node for node, version in found.items() if version is None or _numbers(version) < oldest]
        if old:
            remedy = f"install {name} {_shown(oldest)} or newer on {', '.join(old)} (constraints.txt has a tested set)"
            results.append(CheckResult(key, "fail", seen, expected, remedy))
        elif len(set(found.values())) > 1:
            results.append(CheckResult(key, "fail", seen, expected, f"install the same {name} on every node"))
        else:
            results.append(CheckResult(key, "ok", seen, expected))
    return results


def check_platform(reports: Mapping[str, NodeReport]) -> CheckResult:
    """Whether torch is built for the GPUs' platform, in a version that raytrain supports."""
    expected = f"CUDA {_shown(OLDEST_CUDA)}, ROCm {_shown(OLDEST_ROCM)} or newer where there are GPUs"
    runtimes = {
        f"{node} {row['kind']}": row["runtime"]
        for node, report in reports.items() for row in report.devices if row["kind"] != "cpu"
    }  # fmt: skip
    if not runtimes:
        return CheckResult("platform", "na", "no GPU: raytrain trains on the CPU", expected)
    old = [
        name for name, runtime in runtimes.items()
        if runtime and _numbers(runtime.split()[-1]) < (OLDEST_ROCM if "ROCm" in runtime else OLDEST_CUDA)
    ]  # fmt: skip
    seen = _by_value({name: runtime or "unknown" for name, runtime in runtimes.items()})
    if old:
        return CheckResult("platform", "fail", seen, expected, f"install a newer torch build on {', '.join(old)}")
    return CheckResult("platform", "ok", seen, expected)


def check_clocks(clocks: Mapping[str, tuple[float, float, float]]) -> CheckResult:
    """Whether the nodes' clocks agree with the driver's.

    Args:
        clocks: node -> when the driver asked, what the node's clock said, and when the driver had the answer. A clock
            can be placed no better than within that time.
    """
    skews = {node: max(asked - said, said - answered, 0.0) for node, (asked, said, answered) in clocks.items()}
    worst = max(skews, key=lambda node: skews[node])
    expected = f"less than {CLOCK_S:g} s apart"
    if skews[worst] >= CLOCK_S:
        seen = ", ".join(f"{node} {value:.1f} s" for node, value in skews.items() if value >= CLOCK_S)
        return CheckResult("clocks", "warn", f"at least {seen} away", expected, "run a time service (chrony, ntp)")
    return CheckResult("clocks", "ok", f"{len(skews)} nodes agree" if len(skews) > 1 else "one node", expected)


def check_repeatable(rates: Mapping[str, Sequence[DeviceRates]]) -> CheckResult:
    """Whether every device computes the same product twice."""
    expected = "the same bits in every repetition of a product"
    wrong = [
        f"{one.device} of {node} in {dtype}"
        for node, devices in rates.items() for one in devices
        for dtype, equal in one.repeatable.items() if not equal
    ]  # fmt: skip
    if wrong:
        remedy = "take it out of the cluster (scale.accelerator, CUDA_VISIBLE_DEVICES) and test its memory"
        return CheckResult("repeated_products", "fail", f"different results on {', '.join(wrong)}", expected, remedy)
    count = sum(len(devices) for devices in rates.values())
    seen = f"{counted(count, 'device')}, each format"
    return CheckResult("repeated_products", "ok", seen, expected)


def check_monitoring(rates: Mapping[str, Sequence[DeviceRates]]) -> CheckResult:
    """Whether telemetry sees memory that is allocated on each device."""
    expected = f"telemetry sees {WATCHED >> 20} MiB that are allocated"
    read = {
        f"{one.device} of {node}": one.watched_bytes
        for node, devices in rates.items() for one in devices if one.watched_bytes is not None
    }  # fmt: skip
    if not read:
        return CheckResult("memory_monitoring", "na", "no reading of the memory of a device", expected)
    seen = ", ".join(f"{rise / 2**20:.0f} MiB on {place}" for place, rise in read.items())
    low, high = WATCHED * MONITORED[0], WATCHED * MONITORED[1]
    if all(low <= rise <= high for rise in read.values()):
        return CheckResult("memory_monitoring", "ok", seen, expected)
    remedy = "other programs that allocate there meanwhile? otherwise trust no figure of memory of this driver"
    return CheckResult("memory_monitoring", "warn", seen, expected, remedy)


def check_rates(rates: Mapping[str, Sequence[DeviceRates]]) -> list[CheckResult]:
    """The rates of each kind of device, and the devices that are slower than others of their kind."""
    kinds = defaultdict[str, list[tuple[str, DeviceRates]]](list)
    for node, devices in rates.items():
        for one in devices:
            kinds[one.name].append((f"{one.device} of {node}", one))
    return [_kind_rates(kind, members) for kind, members in kinds.items()]


def _kind_rates(kind: str, members: Sequence[tuple[str, DeviceRates]]) -> CheckResult:
    figures = defaultdict[str, dict[str, float]](dict)
    for place, one in members:
        for dtype, flops in one.flops.items():
            figures[f"{dtype} TFLOP/s"][place] = flops / 1e12
        figures["memory GB/s"][place] = one.memory_bytes_per_s / 1e9
        if one.copy_bytes_per_s is not None:
            figures["host to device GB/s"][place] = one.copy_bytes_per_s / 1e9
    medians = {what: statistics.median(values.values()) for what, values in figures.items()}
    seen = f"{kind}: " + ", ".join(f"{what} {value:.3g}" for what, value in medians.items())
    expected = f"at least {SLOW} of the median of its kind"
    slow = [
        f"{place} {what} {value:.3g} ({value / medians[what]:.2f})"
        for what, values in figures.items() for place, value in values.items() if value < SLOW * medians[what]
    ]  # fmt: skip
    if slow:
        remedy = "look for other programs, heat or power limits there; scale.shares auto gives a slow device less"
        return CheckResult("rates", "warn", f"{seen}; slower: {'; '.join(slow)}", expected, remedy)
    return CheckResult("rates", "ok", seen, expected)


def _version(report: NodeReport, name: str) -> str | None:
    return report.environment["python"] if name == "python" else report.environment["versions"].get(name)


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(char for char in part if char.isdigit()) or 0) for part in parts)


def _shown(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _by_value(found: Mapping[str, Any]) -> str:
    """ "2.60.0" where all are the same, else the nodes of each value."""
    values = dict.fromkeys(found.values())
    if len(values) == 1:
        return str(next(iter(values)))
    return "; ".join(f"{value} on {', '.join(n for n, v in found.items() if v == value)}" for value in values)
