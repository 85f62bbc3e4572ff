"""Where a worker is, for the driver that asks because no step ends."""

from __future__ import annotations

import os
import traceback
from typing import Any

from cluster.telemetry.stacks import own_stacks, stack_of, thread_named
from raytrain.execution.driver_channel import stacks_file
from raytrain.runs.folder import RunFolder

#: The end of the path of the modules in which a worker waits for others.
COLLECTIVES = ("train/parallel/collectives.py", "train/parallel/buckets.py", "experts/transport/process_group.py")
#: The modules in which it waits for its own thread that writes a checkpoint, and how that thread is named.
WRITERS = (("checkpoint/writer.py", "checkpoint"), ("train/parallel/fsdp/checkpoint.py", "shards"))


def write_stacks(run: RunFolder, rank: int, thread: int) -> dict[str, Any]:
    """Write the stacks of this process to logs/rank_00000.stacks; returns what `DriverChannel.report_stacks` takes.

    Args:
        thread: the training thread.
    """
    stack = stack_of(thread)
    stack = _of_writer(stack) or stack
    run.write_text(stacks_file(rank), own_stacks())
    collective = [frame for frame in stack if frame.filename.endswith(COLLECTIVES)]
    place = (collective or stack or [None])[-1]
    where = "" if place is None else f"{place.name} ({os.path.basename(place.filename)}:{place.lineno})"
    return {"waits": bool(collective), "place": where}


def _of_writer(stack: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The stack of the thread that a save waits for: the one that writes the save before it, or the last one."""
    for module, name in WRITERS:
        writes = thread_named(name)
        if writes is not None and any(frame.filename.endswith(module) for frame in stack):
            return stack_of(writes)
    return []
