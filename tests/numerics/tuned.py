"""A worker that fine-tunes a model of a folder, for `run_gang`: it trains, and rank 0 exports the result."""

from __future__ import annotations

from typing import Any

from lab import make_session, train

from raytrain.execution.export import export
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers


def fine_tune(rank: int, world_size: int, model: dict[str, Any], data: dict[str, Any], strategy: str, run: str) -> Any:
    """The losses of four steps in float64 under a strategy, and the bytes of parameters that this worker holds."""
    session = make_session(
        model, data, workers=Workers(), precision="fp64", scale={"strategy": strategy, "workers": world_size},
        loop={"global_batch_size": 12, "micro_batch_size": 3, "max_steps": 4},
    )  # fmt: skip
    held = [getattr(parameter, "_local_tensor", parameter) for parameter in session.trainable.module.parameters()]
    rows, _ = train(session)
    module = session.full_module()
    if rank == 0:
        assert module is not None
        export(session, module, RunFolder(run))
    return rows.losses, sum(part.numel() * part.element_size() for part in held)
