"""Runs a part of a measurement on all workers, and has them agree on the outcome.

It may fail on one worker, or on a host that holds a part of the model. A worker that fails in the middle of its
passes tells the hosts (`RemoteState.end_passes`), so that the failure is a result on every worker and does not end
the attempt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from raytrain.autotune.search.measurement import Outcome
from raytrain.errors import OutOfMemory, first_line
from raytrain.train.memory.device import is_out_of_memory
from raytrain.train.memory.oom import let_go
from raytrain.train.parallel.collectives import Workers
from raytrain.trainable import RemoteState


def run_agreed(
    work: Callable[[], object],
    *,
    workers: Workers,
    device: torch.device,
    remote: RemoteState,
    collective_passes: bool = False,
    budget: int | None = None,
) -> tuple[Outcome, str]:
    """Run `work`; the outcome, the same on every worker, and the reason of a failure, after which its passes are
    discarded, also on remote hosts. Collective.

    `work` contains no collective except the passes of a model with remote state, and every worker starts the same
    number of those.

    Args:
        collective_passes: passes contain collectives that no worker can leave (`fsdp`): a failure is raised, and ends
            the attempt.
        budget: bytes that this process may have, see `is_out_of_memory`.
    """
    outcome: Outcome = "ok"
    reason = ""
    try:
        work()
    except (RuntimeError, ValueError, MemoryError, OutOfMemory) as error:
        if collective_passes and not remote.distributed and workers.world_size > 1:
            raise
        outcome = "out_of_memory" if is_out_of_memory(error, device=device, budget=budget) else "error"
        reason = first_line(error)
        let_go(error, device)
    remote.end_passes(short=outcome != "ok")
    short, failed = workers.all_reduce_ints([int(outcome == "out_of_memory"), int(outcome == "error")])
    if not short and not failed:
        hosts = remote.shortages()
        short, reason = len(hosts), "; ".join(map(str, hosts))
    if not short and not failed:
        return "ok", ""
    remote.discard()
    return "out_of_memory" if short else "error", reason or "on another worker"
