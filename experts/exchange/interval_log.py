"""The rows of experts.jsonl: of each window between two logged rows what every expert and every host had to do.

One row is also one window of a load trace, as `raytrain bench placement trace=` reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experts.exchange.worker import ExpertClient
from experts.placement.values import Placement
from experts.plan.bytes import expert_costs
from experts.routing.load import LoadBook
from raytrain.trainable import IntervalRow


class LoadLog:
    """See the module; implements `raytrain.trainable.IntervalLog`.

    A row: {"kind": "load", "step": its last, "steps": how many, "layers": [[rows of each expert]], "dropped": of each
    layer, "idle": [[steps since each expert had a row, null = never]]}, and where experts live outside the workers'
    model "hosts": {"version" of the placement, "rows": [[of each host] of each layer], "bytes", "busy_s"} and
    "workers": {"wait_s": seconds in the exchange, the hosts' computing included}. Rows of skipped steps count for
    hosts, which computed them, and for no expert; so do those of padding.

    Args:
        book: of the routers.
        pool: None where every worker holds the experts.
    """

    def __init__(self, book: LoadBook, pool: ExpertClient | None = None) -> None:
        self.book, self.pool = book, pool
        self._told = 0.0
        self._busy: list[float] = []
        self._shown: Placement | None = None

    def device_values(self) -> Tensor:
        """Counts of the window, and the step of each one's last use."""
        return torch.cat([self.book.window, self.book.used])

    def host_values(self) -> list[float]:
        """This worker's seconds in the exchange, bytes and rows."""
        if self.pool is None:
            return []
        spent, self._told = self.pool.group.seconds - self._told, self.pool.group.seconds
        return [spent, *self.pool.traffic.take()]

    def forget(self) -> None:
        """No trace of a measurement; its counts went with the routers' buffers."""
        if self.book.trace is not None:
            self.book.trace.forget()

    def close(self, step: int, device: list[float], workers: list[list[float]]) -> IntervalRow:
        """The row, and `transport_s` (mean of the workers, a step) and `host_imbalance` (most rows over mean)."""
        book, half = self.book, len(device) // 2
        counts, used = self._by_layer(device[:half]), self._by_layer(device[half:])
        row: dict[str, Any] = {
            "kind": "load",
            "step": step,
            "steps": book.window_steps,
            "layers": [[int(count) for count in part[:-1]] for part in counts],
            "dropped": [int(part[-1]) for part in counts],
            "idle": [[book.step - int(last) if last else None for last in part[:-1]] for part in used],
        }
        metrics: dict[str, float] = {}
        if self.pool is not None:
            row["workers"] = {"wait_s": [one[0] for one in workers]}
            row["hosts"] = self._hosts(workers)
            metrics["transport_s"] = sum(one[0] for one in workers) / len(workers) / max(1, book.window_steps)
            loads = [sum(column) for column in zip(*row["hosts"]["rows"], strict=True)]
            metrics["host_imbalance"] = max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
        book.window_steps = 0
        book.window = torch.zeros_like(book.window)
        return IntervalRow(metrics, row, book.trace.take() if book.trace is not None else {}, self._placement(step))

    def _placement(self, step: int) -> list[tuple[str, dict[str, Any]]]:
        """The placement in force where it was not told yet, with the bytes of each host: the first, and after moves."""
        if self.pool is None or self.pool.placement is self._shown:
            return []
        self._shown = placement = self.pool.placement
        optim, dtype = self.pool.optim, str(self.pool.dtype).removeprefix("torch.")
        costs = expert_costs(self.pool.shapes, optim, dtype="fp64" if dtype == "float64" else "fp32")
        taken = [placement.bytes_on(host, costs) for host in range(placement.num_hosts)]
        names = [spec.device for spec in self.pool.member.hosts]
        return [("placement", {"step": step, **placement.to_json(), "bytes": taken, "devices": names})]

    def _by_layer(self, flat: list[float]) -> list[list[float]]:
        found, start = [], 0
        for size in self.book.sizes:
            found.append(flat[start : start + size])
            start += size
        return found

    def _hosts(self, workers: list[list[float]]) -> dict[str, Any]:
        assert self.pool is not None
        hosts = self.pool.placement.num_hosts
        total = [int(sum(column)) for column in zip(*(one[1:] for one in workers), strict=True)]
        spent = list(self.pool.busy_s)
        busy = [now - before for now, before in zip(spent, self._busy or [0.0] * hosts, strict=True)]
        self._busy = spent
        rows = [total[start : start + hosts] for start in range(hosts, len(total), hosts)]
        return {"version": self.pool.placement.version, "rows": rows, "bytes": total[:hosts], "busy_s": busy}
