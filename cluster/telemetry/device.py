"""One device at one moment, with the same keys for a CPU and for the GPUs of NVIDIA and AMD."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class DeviceSample:
    """What a device does at the moment. A figure that cannot be read is None, and `unavailable` says why.

    Attributes:
        kind: "cpu" or "cuda" (as torch calls AMD's devices too).
        index: as torch counts the visible devices; 0 for the CPU.
        utilisation: percent of the time since the last sample; of a CPU, of all usable cores.
        memory_total, memory_used: bytes; of a CPU the machine's memory, or its cgroup's limit.
        memory_run: bytes of `memory_used` that the processes of the run hold.
        memory_other: the rest: other processes, and what the driver or the kernel keeps.
        temperature_c, power_w, clock_mhz, memory_clock_mhz: of the device.
        throttle: reasons for which it is slower than it could be; empty: none.
        unavailable: key -> why it is None.
    """

    kind: str
    index: int
    name: str
    uuid: str | None
    utilisation: float | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_run: int | None = None
    memory_other: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle: list[str] | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping with every key."""
        return dict(vars(self))

    @property
    def title(self) -> str:
        """As torch names it: cpu, cuda:0."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def reading(values: dict[str, Any], reasons: dict[str, str]) -> dict[str, Any]:
    """Fields of a `DeviceSample` from values that may be None, with the reason of each that is."""
    unavailable = {key: reasons.get(key, "not reported") for key, value in values.items() if value is None}
    return {**values, "unavailable": unavailable}
