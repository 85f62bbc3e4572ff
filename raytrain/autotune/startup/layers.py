"""`precision.fp32_layers: auto` on the real model: measured once, and what follows is used by all."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain.autotune.probe.layers import MOST_LAYERS, LayerProbe
from raytrain.autotune.search.layers import LayerChange
from raytrain.autotune.startup.micro_batch import take_fitting_rows
from raytrain.autotune.startup.record import Push, shared_record, write_decision
from raytrain.errors import OutOfMemory
from raytrain.plan.choice import Deferred, Resolved
from raytrain.runs.folder import RunFolder
from raytrain.train.precision.layers import layers_of
from raytrain.train.precision.policy import policy_for
from raytrain.train.session import Session
from raytrain.train.state import Reporter


def resolve_layers(
    session: Session, run: RunFolder, *, precisions: Sequence[str], reporter: Reporter, push: Push
) -> None:
    """Layers that stay in fp32, where the plan leaves it open; needs a prepared session. Collective.

    Args:
        precisions: in which the rest will or may compute; the first half precision counts.
    """
    if not isinstance(session.job.plan.fp32_layers, Deferred):
        return
    half = next((name for name in precisions if policy_for(name).autocast_dtype is not None), None)
    if half is None:
        session.apply_choices(fp32_layers=Resolved([], "nothing computes in half precision"))
        return
    known = shared_record(session, run, "fp32_layers")
    if known is not None and known["trials"]["precision"] == half:
        session.apply_choices(fp32_layers=Resolved(known["value"], known["reason"]))
        return
    # not before it is known that they are measured: what stands in the record is of the layers that were found
    take_fitting_rows(session, run, reporter=reporter, push=push)
    chosen, changes = measure_layers(session, half)
    session.apply_choices(fp32_layers=chosen)
    trials = {"precision": half, "layers": [change.to_json() for change in changes]}
    if session.workers.rank == 0:
        write_decision(run, "fp32_layers", chosen, trials, reporter)


def measure_layers(session: Session, precision: str) -> tuple[Resolved, list[LayerChange]]:
    """Which layers must stay in fp32 under this half precision, from the first micro-batch of the window, the same on
    every worker, or from a half of it as often as it takes until fp32, in which they are held against each other, has
    room; changes nothing it measures. Collective."""
    indices, _ = session.loader.window(session.state.cursor)
    trainable = session.trainable
    blocks = trainable.blocks if isinstance(trainable.blocks, str) else None
    names = layers_of(trainable.module, blocks=blocks, most=MOST_LAYERS)
    rows, why = session.loader.batches.micro_batch, ""
    while rows:
        micro = session.loader.first(indices[:rows])
        try:
            return LayerProbe(session.step, session.layers, micro, precision=precision).run(names)
        except OutOfMemory as error:
            rows, why = rows // 2, str(error)
    return Resolved([], f"not one row has room in fp32 to hold layers against ({why}): watch the loss"), []
