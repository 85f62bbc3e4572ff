"""The rows of telemetry as metrics of Ray: gauges on the Prometheus endpoint of every node. Imports Ray lazily."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GAUGES = {
    "utilisation": ("raytrain_utilisation_percent", "time in which the device worked"),
    "memory_total": ("raytrain_memory_total_bytes", "memory of the device"),
    "memory_used": ("raytrain_memory_used_bytes", "memory in use, of all processes"),
    "memory_run": ("raytrain_memory_run_bytes", "memory in use by the run"),
    "memory_other": ("raytrain_memory_other_bytes", "memory in use by others"),
    "temperature_c": ("raytrain_temperature_celsius", "temperature of the device"),
    "power_w": ("raytrain_power_watts", "power of the device"),
    "clock_mhz": ("raytrain_clock_mhz", "clock of the device"),
    "memory_clock_mhz": ("raytrain_memory_clock_mhz", "clock of the device's memory"),
}
"""Key of a device -> name of the gauge (Ray puts `ray_` before it) and description."""
TAGS = ("run", "node", "device")
PROCESS = ("raytrain_process_rss_bytes", "resident memory of a process of the run")
THROTTLED = ("raytrain_throttled", "1 while the device is slowed down")


class RayGauges:
    """Publishes rows; in a process that is connected to Ray.

    Args:
        run: name of the run, a tag of every gauge.
    """

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Gauge

        self._run = run
        self._gauges = {key: Gauge(name, about, tag_keys=TAGS) for key, (name, about) in GAUGES.items()}
        self._throttled = Gauge(*THROTTLED, tag_keys=TAGS)
        self._process = Gauge(*PROCESS, tag_keys=("run", "node", "process", "pid"))

    def publish(self, row: Mapping[str, Any]) -> None:
        """Set the gauges to the figures of a row; a figure that is None keeps its last value."""
        node = {"run": self._run, "node": str(row["node"])}
        for device in row["devices"]:
            tags = {**node, "device": str(device["device"])}
            for key, gauge in self._gauges.items():
                if device[key] is not None:
                    gauge.set(float(device[key]), tags)
            if device["throttle"] is not None:
                self._throttled.set(float(bool(device["throttle"])), tags)
        for process in row["processes"]:
            self._process.set(
                float(process["rss"]), {**node, "process": process["name"][:40], "pid": str(process["pid"])}
            )
