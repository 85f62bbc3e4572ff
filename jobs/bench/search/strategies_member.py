"""A process of bench `strategies`: a worker with its session, or an expert host, of one strategy. Without Ray.

    python -m jobs.bench.search.strategies_member SETTINGS.json RANK

Workers serve requests of the bench, hosts serve the workers; waiting uses no CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experts.placement.starting import first_placement
from experts.placement.values import Placement
from jobs.bench.experts.file_group import FileConnection, serve_host
from jobs.bench.harness.processes import serve_blocks
from jobs.bench.harness.sessions import SessionArm
from raytrain.train.memory.allocator import keep_freed_memory


def place(settings: dict[str, Any]) -> Placement:
    """Where the experts of each layer are, the same in every process."""
    return first_placement(settings["experts"], hosts=settings["hosts"] or settings["workers"])


def work(settings: dict[str, Any], rank: int) -> None:
    """A worker: joins the group of workers, then trains a block for each request."""
    if settings["workers"] > 1:
        store = dist.FileStore(f"{settings['store']}.workers", settings["workers"])  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=settings["workers"])
    connection = FileConnection(settings, rank, lambda _shapes, _rules: place(settings)) if settings["remote"] else None
    arm = SessionArm(settings["job"], precision="fp32", connection=connection)
    serve_blocks(settings["arm"], rank, lambda request: arm.run_together(request["steps"]))
    if settings["remote"]:
        arm.session.full_module()  # lets the hosts exit
    if settings["workers"] > 1:
        dist.destroy_process_group()


def main(settings: dict[str, Any], rank: int) -> None:
    """Run as the process of this rank: workers first, then hosts."""
    keep_freed_memory()
    torch.set_num_threads(settings["threads"])
    if rank < settings["workers"]:
        work(settings, rank)
    else:
        serve_host(settings, rank, place(settings))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
