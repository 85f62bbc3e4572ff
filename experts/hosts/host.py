"""The Ray actor that owns experts: control methods that Ray calls, and one data thread per generation.

It runs in its own process, with its own GPU if there is one. The data thread serves the joint group
(`experts.exchange.host_server`); the control methods only start it, stop it, and describe the host.
"""

from __future__ import annotations

import os
import threading
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from experts.config import LayerShape
from experts.exchange.host_server import HostServer
from experts.exchange.rebalancer import kind_of, measure_speed
from experts.grouped import take_fallbacks
from experts.hosts.generation import GenerationSpec, open_group
from experts.placement.policy import MEMORY_SHARE
from experts.placement.values import HostSpec
from experts.transport import JointGroup
from raytrain.errors import StateLost
from raytrain.execution.driver_channel import FELL_BACK
from raytrain.execution.telemetry import HostTelemetry
from raytrain.train.device import set_determinism
from raytrain.train.memory.device import keep_freed_memory, limit_device_memory

LEAVE_S = 60.0
"""A host on a GPU whose data thread has not ended this long after an abort ends its process."""


@dataclass(frozen=True)
class ProcessLimits:
    """What the process of a host keeps to from its start, as the workers do: keys of `cluster` and `loop`."""

    memory_fraction: float = 1.0
    memory_limit: int | None = None
    deterministic: bool = False

    def apply(self, device: torch.device) -> float:
        """Set them in this process; returns the share of the device's memory that it may use."""
        set_determinism(deterministic=self.deterministic)
        share = limit_device_memory(device, fraction=self.memory_fraction, limit=self.memory_limit)
        return 1.0 if share is None else share


@dataclass
class HostPlace:
    """The place of one host: its actor (None if the place is given up), and its description once it is ready."""

    host: Any
    about: dict[str, Any] | None = None
    tries: int = 0
    why: str = "it has not started yet"

    @property
    def kind(self) -> str:
        return str((self.about or {}).get("kind", ""))

    def spec(self, rank: int, speed: float) -> HostSpec:
        about = self.about or {}
        memory = about.get("memory_bytes")
        room = None if memory is None else int(min(MEMORY_SHARE, about.get("memory_share", 1.0)) * memory)
        node, device = str(about.get("node", "")), str(about.get("name", ""))
        return HostSpec(rank, speed, room, node=node, device=device, kind=self.kind)


class ExpertHost:
    """Owns experts in a process of its own; created by the `ExpertDirectory`, and ends with it.

    Args:
        threads: CPU threads of the data thread. device: "cpu" or "cuda".
        directory: notified when a generation fails here.
        telemetry: samples this node where no worker does.
    """

    def __init__(
        self, *, threads: int, device: str, directory: Any, limits: ProcessLimits | None = None,
        telemetry: HostTelemetry | None = None,
    ) -> None:  # fmt: skip
        keep_freed_memory()
        if telemetry is not None:
            telemetry.start()
        torch.set_num_threads(threads)
        where = torch.device("cuda", 0) if device == "cuda" else torch.device(device)  # Ray shows an actor its own GPU
        self._memory_share = (limits or ProcessLimits()).apply(where)
        self._threads, self._device, self._directory = threads, device, directory
        self._group: JointGroup | None = None
        self._server: HostServer | None = None
        self._thread: threading.Thread | None = None
        self._control = threading.Lock()
        self._generation, self._over = 0, ""

    def ready(self) -> dict[str, Any]:
        """Describe the machine, process and device; callable once the host is ready."""
        device = self._device
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
        kind = kind_of(torch.device(device), threads=self._threads)
        about = {"node": os.uname().nodename, "pid": os.getpid(), "kind": kind}
        share = {} if memory is None else {"memory_share": self._memory_share}
        return {"device": device, "name": name, "memory_bytes": memory, **share, **about}

    def ping(self) -> list[str]:
        """Return at once, with lines to print: the directory asks whether this process responds."""
        return [f"{FELL_BACK}{line}" for line in take_fallbacks()]

    def measure(self, shapes: list[LayerShape], dtype: str) -> float:
        """See `experts.exchange.rebalancer.measure_speed`; called before the first generation."""
        return measure_speed(torch.device(self._device), shapes, dtype, threads=self._threads)

    def stay(self) -> None:
        """Never returns while the process lives; the directory learns of a death when this call fails."""
        threading.Event().wait()

    def join(self, spec: GenerationSpec, host: int) -> None:
        """Leave the last generation, and serve the next one as `host` in a new data thread; returns at once."""
        with self._control:
            self._leave("the next generation starts")
            self._generation, self._over = spec.number, ""
            self._thread = threading.Thread(target=self._serve, args=(spec, host), daemon=True, name="expert-data")
            self._thread.start()

    def abort(self, generation: int, reason: str) -> None:
        """End this generation on this member, whatever its data thread waits for; any other is left alone."""
        with self._control:
            if generation == self._generation:
                self._leave(reason)

    def _leave(self, reason: str) -> None:
        thread, self._over = self._thread, reason
        if thread is None:
            return
        if self._group is not None:
            self._group.abort(reason)
        if self._server is not None:
            self._server.stop()
        thread.join(None if self._device == "cpu" else LEAVE_S)
        if thread.is_alive():  # it waits for the device, and nothing in this process can end that
            print(f"the data thread of this expert host has not ended {LEAVE_S:g} s after: {reason}", flush=True)
            os._exit(1)  # the directory replaces a host that has died
        if self._server is not None and self._server.files is not None:
            self._server.files.wait()  # the next generation may write a checkpoint of the same step
        self._thread = self._group = self._server = None

    def _serve(self, spec: GenerationSpec, host: int) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._group = group = open_group(spec, rank=spec.workers + host, lost=lambda: self._over or None)
            if self._over:  # `abort` was called before the group existed
                group.abort(self._over)
            self._server = HostServer(
                group, host=host, generation=spec.number, placement=spec.placement, device=group.device
            )
            self._server.serve()
        except StateLost as error:
            self._report(spec, host, str(error), "")
        except Exception as error:  # the workers wait for this member: they must learn of it
            self._report(spec, host, f"{type(error).__name__}: {error}", traceback.format_exc())

    def _report(self, spec: GenerationSpec, host: int, reason: str, trace: str) -> None:
        self._directory.failed.remote(spec.number, f"expert host {host}: {reason}", trace)
