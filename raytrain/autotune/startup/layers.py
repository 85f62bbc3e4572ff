"""`precision.fp32_layers: auto` on the real model: which layers must stay in fp32 under half precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.wording import counted
from raytrain.autotune.probe.layers import MOST_LAYERS, LayerProbe
from raytrain.autotune.search.layers import LayerChange
from raytrain.autotune.startup.choice import Calibration, DeferredChoice, Record, record_of
from raytrain.autotune.startup.micro_batch import use_fitting_rows
from raytrain.errors import OutOfMemory
from raytrain.plan.choice import Resolved
from raytrain.train.precision.layers import layers_of
from raytrain.train.precision.policy import policy_for
from raytrain.train.session import Session


class LayersChoice(DeferredChoice):
    """Layers that stay in fp32; needs a prepared session.

    Args:
        precisions: in which the other layers compute or may compute; the first half precision counts.
    """

    name = "fp32_layers"

    def __init__(self, calibration: Calibration, *, precisions: Sequence[str]) -> None:
        super().__init__(calibration)
        self._half = next((name for name in precisions if policy_for(name).autocast_dtype is not None), None)

    def resolve(self) -> None:
        """See `DeferredChoice.resolve`; no layer, if nothing computes in half precision."""
        if self._half is not None:
            super().resolve()
        elif self.applies():
            self.session.use(replace(self.session.settings, fp32_layers=()))

    def settings(self) -> str | None:
        """The half precision."""
        return self._half

    def settings_of(self, known: Record) -> str:
        """The half precision that was measured."""
        return known["trials"]["precision"]

    def shown(self, record: Record) -> tuple[str, str] | None:
        """How many layers stay in fp32, if any does."""
        layers = counted(len(record["value"]), "layer")
        return ("precision", f"{layers} in fp32 where others are in {self._half}") if record["value"] else None

    def measure(self, settings: str) -> Record:
        """See `measure_layers`."""
        use_fitting_rows(self.calibration)  # not earlier: a recorded micro-batch may be of the layers found here
        chosen, changes = measure_layers(self.session, settings)
        return record_of(chosen, {"precision": settings, "layers": [change.to_json() for change in changes]})

    def apply(self, record: Record) -> None:
        """Compute the layers in fp32."""
        self.session.use(replace(self.session.settings, fp32_layers=tuple(record["value"])))


def measure_layers(session: Session, precision: str) -> tuple[Resolved, list[LayerChange]]:
    """Which layers must stay in fp32 under this half precision, measured on the first micro-batch of the global batch,
    the same on every worker. Its rows are halved until they fit in fp32, the reference. Changes nothing that it
    measures. Collective."""
    indices, _ = session.loader.global_batch(session.state.cursor)
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
    return Resolved([], f"not one row fits in fp32 to compare layers with ({why}): watch the loss"), []
