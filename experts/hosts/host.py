"""The Ray actor that owns experts: a control side that Ray calls, and one data thread per generation.

It runs in a process of its own, with its own GPU where there is one. The data thread serves the joint group
(`experts.exchange.host`); the control methods only start it, stop it, and say how it goes.
"""

from __future__ import annotations

import os
import threading
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from experts.exchange.host import HostServer
from experts.hosts.generation import open_group
from experts.placement.starting import MEMORY_SHARE
from experts.placement.values import HostSpec, Placement
from experts.transport.process_group import JointGroup
from raytrain.errors import StateLost
from raytrain.train.memory.allocator import keep_freed_memory


@dataclass
class HostPlace:
    """Where one host is: its actor (None where the place is given up), and what it is, once it stands."""

    host: Any
    about: dict[str, Any] | None = None
    tries: int = 0
    why: str = "it has not started yet"

    def spec(self, rank: int) -> HostSpec:
        """What is known of the host before any of its work was measured."""
        about = self.about or {}
        memory = about.get("memory_bytes")
        room = None if memory is None else int(MEMORY_SHARE * memory)
        return HostSpec(rank, 1.0, room, node=str(about.get("node", "")), device=str(about.get("name", "")))


class ExpertHost:
    """Made by the `ExpertDirectory`, which is its owner: it ends with it.

    Args:
        threads: CPU threads of the data thread.
        device: "cpu" or "cuda", as the plan says.
        directory: handle of the directory, told when a generation fails here.
    """

    def __init__(self, *, threads: int, device: str, directory: Any) -> None:
        keep_freed_memory()
        torch.set_num_threads(threads)
        self._threads, self._device, self._directory = threads, device, directory
        self._group: JointGroup | None = None
        self._server: HostServer | None = None
        self._thread: threading.Thread | None = None
        self._control = threading.Lock()
        self._generation, self._over = 0, ""

    def ready(self) -> dict[str, Any]:
        """Its machine, process and device, once it stands."""
        device = self._device
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
        about = {"node": os.uname().nodename, "pid": os.getpid()}
        return {"device": device, "name": name, "memory_bytes": memory, **about}

    def stay(self) -> None:
        """Never returns while the process lives: its end is how the directory hears of a death."""
        threading.Event().wait()

    def join(self, told: dict[str, Any]) -> None:
        """Leave the generation before, and serve the next one in a new data thread; returns at once.

        Args:
            told: {"generation", "host", "workers", "hosts", "address": (host, port), "interface", "device",
                "placement"}.
        """
        with self._control:
            self._leave("the next generation begins")
            self._generation, self._over = told["generation"], ""
            self._thread = threading.Thread(target=self._serve, args=(told,), daemon=True, name="expert-data")
            self._thread.start()

    def abort(self, generation: int, reason: str) -> None:
        """End this generation on this member, whatever its data thread waits for; another one is left alone."""
        with self._control:
            if generation == self._generation:
                self._leave(reason)

    def _leave(self, reason: str) -> None:
        thread, self._over = self._thread, reason
        if thread is None:
            return
        if self._group is not None:
            self._group.abort(reason)
        thread.join()
        if self._server is not None and self._server.files is not None:
            self._server.files.wait()  # the next generation may write a checkpoint of the same step
        self._thread = self._group = self._server = None

    def _serve(self, told: dict[str, Any]) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._group = group = open_group(told, rank=told["workers"] + told["host"], lost=lambda: self._over or None)
            if self._over:  # `abort` came before there was a group to end
                group.abort(self._over)
            self._server = HostServer(
                group,
                host=told["host"],
                generation=told["generation"],
                placement=Placement.from_json(told["placement"]),
                device=group.device,
            )
            self._server.serve()
        except StateLost as error:
            self._tell(told, str(error), "")
        except Exception as error:  # the workers wait for this member: they must hear of it
            self._tell(told, f"{type(error).__name__}: {error}", traceback.format_exc())

    def _tell(self, told: dict[str, Any], reason: str, trace: str) -> None:
        where = f"expert host {told['host']}"
        self._directory.failed.remote(told["generation"], f"{where}: {reason}", trace)
