"""Resolves, at the start of an attempt, every choice that the plan leaves to a measurement on the real model."""

from __future__ import annotations

from raytrain.autotune.startup.choice import Calibration
from raytrain.autotune.startup.compile import CompileChoice, measure_eager_step
from raytrain.autotune.startup.confirm import FoundConfirmation
from raytrain.autotune.startup.inflight import InflightChoice
from raytrain.autotune.startup.micro_batch import MicroBatchChoice
from raytrain.autotune.startup.overlap import OverlapChoice
from raytrain.autotune.startup.precision import PrecisionChoice
from raytrain.autotune.startup.shares import SharesChoice
from raytrain.checkpoint.reader import LoadedCheckpoint


def resolve_choices(calibration: Calibration, *, forced: str | None, loaded: LoadedCheckpoint | None) -> None:
    """Prepare the session and apply all choices to it. Collective.

    The order matters: each choice is measured with the ones before it in force. Compilation is measured with the
    micro-batch that fits without it, since a compiled step usually needs less memory. A run that compiles then measures
    a step without compilation.

    Args:
        forced: precision that the failure rules demand.
        loaded: the checkpoint to resume from; the session is not restored yet.

    Raises:
        RunError: not even one row fits into memory.
        StateLost: an expert host died.
    """
    PrecisionChoice(calibration, forced=forced, loaded=loaded).resolve()
    MicroBatchChoice(calibration).resolve()
    FoundConfirmation(calibration).resolve()
    CompileChoice(calibration, done=int(loaded.state["loop"]["step"]) if loaded else 0).resolve()
    for choice in (InflightChoice, SharesChoice, OverlapChoice):
        choice(calibration).resolve()
    measure_eager_step(calibration)
