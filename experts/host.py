"""The Ray actor that owns experts: a control side that Ray calls, and one data thread per generation.

It runs in a process of its own, with its own GPU where there is one. The data thread serves the joint group
(`experts.serve`); the control methods only start it, stop it, and say how it goes.
"""

from __future__ import annotations

import threading
import traceback
from typing import Any

import torch
import torch.distributed as dist

from experts.placement import Placement
from experts.serve import HostServer
from experts.transport.process_group import JointGroup
from experts.transport.protocol import Aborted
from raytrain.allocator import keep_freed_memory


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

    def ready(self) -> dict[str, Any]:
        """Its process and device, once it stands."""
        device = self._device
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
        return {"device": device, "name": name, "memory_bytes": memory}

    def stay(self) -> None:
        """Never returns while the process lives: its end is how the directory hears of a death."""
        threading.Event().wait()

    def join(self, told: dict[str, Any]) -> None:
        """Leave the generation before, and serve the next one in a new data thread; returns at once.

        Args:
            told: {"generation", "host", "workers", "hosts", "address": (host, port), "interface", "device",
                "placement"}.
        """
        self.abort("the next generation begins")
        self._thread = threading.Thread(target=self._serve, args=(told,), daemon=True, name="expert-data")
        self._thread.start()

    def abort(self, reason: str) -> None:
        """End the generation on this member, whatever its data thread waits for."""
        thread, group = self._thread, self._group
        if thread is None:
            return
        if group is not None:
            group.abort(reason)
        thread.join(timeout=30.0)
        self._thread = self._group = self._server = None

    def _serve(self, told: dict[str, Any]) -> None:
        torch.set_num_threads(self._threads)
        try:
            self._group = group = open_group(told, rank=told["workers"] + told["host"])
            self._server = HostServer(
                group,
                host=told["host"],
                generation=told["generation"],
                placement=Placement.from_json(told["placement"]),
                device=group.device,
            )
            self._server.serve()
        except Aborted as error:
            self._tell(told, str(error), "")
        except Exception as error:  # the workers wait for this member: they must hear of it
            self._tell(told, f"{type(error).__name__}: {error}", traceback.format_exc())

    def _tell(self, told: dict[str, Any], reason: str, trace: str) -> None:
        where = f"expert host {told['host']}"
        self._directory.failed.remote(told["generation"], f"{where}: {reason}", trace)


def open_group(told: dict[str, Any], *, rank: int) -> JointGroup:
    """A member's end of the generation's joint group; blocks until all members are there."""
    host, port = told["address"]
    store = dist.TCPStore(host, port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    workers, hosts = told["workers"], told["hosts"]
    return JointGroup(
        store,
        name=f"generation-{told['generation']}",
        rank=rank,
        size=workers + hosts,
        workers=workers,
        holders=list(range(workers, workers + hosts)),
        device=torch.device(told["device"]),
        interface=told["interface"],
        watched=True,
    )
