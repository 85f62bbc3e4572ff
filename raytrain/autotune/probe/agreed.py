"""Work of a measurement that may fail on one worker or where parts of the model live: tried by all, and agreed on.

Whoever fails in the middle of passes leaves them to the others (`RemoteState.end_passes`), so that a failure is a
result for everybody and not the end of the attempt.
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
    remote: RemoteState | None,
    meets: bool = False,
    budget: int | None = None,
) -> tuple[Outcome, str]:
    """Do it, and agree with the others on whether it went well: the outcome, the same on every worker, and why. Where
    it did not, the passes in it are forgotten, also where they ran elsewhere. Collective.

    What is tried meets the other workers nowhere but in the passes of a model of which parts live elsewhere, and
    everybody begins as many of those.

    Args:
        meets: workers meet inside their passes in a way that nobody can leave (`fsdp`): a failure is raised, and ends
            the attempt.
        budget: bytes that this process may have, see `is_out_of_memory`.
    """
    outcome: Outcome = "ok"
    reason = ""
    try:
        work()
    except (RuntimeError, ValueError, MemoryError, OutOfMemory) as error:
        if meets and remote is None and workers.world_size > 1:
            raise
        outcome = "out_of_memory" if is_out_of_memory(error, device=device, budget=budget) else "error"
        reason = first_line(error)
        let_go(error, device)
    if remote is not None:
        remote.end_passes(short=outcome != "ok")
    short, failed = workers.all_reduce_ints([int(outcome == "out_of_memory"), int(outcome == "error")])
    if remote is not None and not short and not failed:
        hosts = remote.shortages()
        short, reason = len(hosts), "; ".join(map(str, hosts))
    if not short and not failed:
        return "ok", ""
    if remote is not None:
        remote.discard()
    return "out_of_memory" if short else "error", reason or "on another worker"
