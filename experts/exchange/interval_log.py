"""The rows of experts.jsonl: the load of every expert and every host in each log interval."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experts.exchange.worker import ExpertClient
from experts.placement.values import Placement
from experts.plan.bytes import expert_costs
from experts.routing.load import LoadTracker
from raytrain.trainable import IntervalRow


class LoadLog:
    """Writes the expert rows of each log interval; implements `raytrain.trainable.IntervalLog`.

    A row: {"kind": "load", "step": the last, "steps": their number, "layers": [[rows of each expert]], "dropped": of
    each layer, "idle": [[steps since each expert had a row, null = never]]}. With experts in other processes also
    "hosts": {"version" of the placement, "rows": [[of each host] of each layer], "bytes", "busy_s"} and "workers":
    {"wait_s": seconds in the exchange, the hosts' computing included}. Rows of skipped steps and of padding count for
    the hosts, which computed them, but for no expert.

    Args:
        loads: of the routers.
        client: None where every worker holds all experts.
    """

    def __init__(self, loads: LoadTracker, client: ExpertClient | None = None) -> None:
        self.loads, self.client = loads, client
        self._seconds_before = 0.0
        self._busy_before: list[float] = []
        self._logged_placement: Placement | None = None

    def device_values(self) -> Tensor:
        """The interval's counts, and the step of each one's last use."""
        return torch.cat([self.loads.window, self.loads.used])

    def host_values(self) -> list[float]:
        """This worker's seconds in the exchange, bytes and rows."""
        if self.client is None:
            return []
        spent, self._seconds_before = self.client.group.seconds - self._seconds_before, self.client.group.seconds
        return [spent, *self.client.traffic.take()]

    def forget(self) -> None:
        """Forget the routing trace of a measurement; its counts are reset with the routers' buffers."""
        if self.loads.trace is not None:
            self.loads.trace.forget()

    def close(self, step: int, device: list[float], workers: list[list[float]]) -> IntervalRow:
        """Return the row; metrics: `transport_s` (per step, mean of the workers), `host_imbalance` (max over mean)."""
        loads, half = self.loads, len(device) // 2
        counts, used = self._by_layer(device[:half]), self._by_layer(device[half:])
        row: dict[str, Any] = {
            "kind": "load",
            "step": step,
            "steps": loads.window_steps,
            "layers": [[int(count) for count in part[:-1]] for part in counts],
            "dropped": [int(part[-1]) for part in counts],
            "idle": [[loads.step - int(last) if last else None for last in part[:-1]] for part in used],
        }
        metrics: dict[str, float] = {}
        if self.client is not None:
            row["workers"] = {"wait_s": [one[0] for one in workers]}
            row["hosts"] = self._hosts(workers)
            metrics["transport_s"] = sum(one[0] for one in workers) / len(workers) / max(1, loads.window_steps)
            rows = [sum(column) for column in zip(*row["hosts"]["rows"], strict=True)]
            metrics["host_imbalance"] = max(rows) * len(rows) / sum(rows) if sum(rows) else 1.0
        loads.window_steps = 0
        loads.window = torch.zeros_like(loads.window)
        return IntervalRow(metrics, row, loads.trace.take() if loads.trace is not None else {}, self._placement(step))

    def _placement(self, step: int) -> list[tuple[str, dict[str, Any]]]:
        """An event with the placement and the bytes of each host: the first time, and after each switch."""
        if self.client is None or self.client.placement is self._logged_placement:
            return []
        self._logged_placement = placement = self.client.placement
        optim, dtype = self.client.optim, str(self.client.dtype).removeprefix("torch.")
        costs = expert_costs(self.client.shapes, optim, dtype="fp64" if dtype == "float64" else "fp32")
        used = [placement.bytes_on(host, costs) for host in range(placement.num_hosts)]
        hosts = self.client.member.hosts
        row = {"step": step, **placement.to_json(), "bytes": used, "devices": [spec.device for spec in hosts]}
        measured = len({spec.kind for spec in hosts}) > 1
        if measured:
            row |= {"kinds": [spec.kind for spec in hosts], "speeds": [spec.speed for spec in hosts]}
        return [("placement", row)]

    def _by_layer(self, flat: list[float]) -> list[list[float]]:
        found, start = [], 0
        for size in self.loads.sizes:
            found.append(flat[start : start + size])
            start += size
        return found

    def _hosts(self, workers: list[list[float]]) -> dict[str, Any]:
        assert self.client is not None
        hosts = self.client.placement.num_hosts
        total = [int(sum(column)) for column in zip(*(one[1:] for one in workers), strict=True)]
        spent = list(self.client.busy_s)
        busy = [now - before for now, before in zip(spent, self._busy_before or [0.0] * hosts, strict=True)]
        self._busy_before = spent
        rows = [total[start : start + hosts] for start in range(hosts, len(total), hosts)]
        return {"version": self.client.placement.version, "rows": rows, "bytes": total[:hosts], "busy_s": busy}
