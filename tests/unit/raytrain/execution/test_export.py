"""What exported weights say of themselves."""

from __future__ import annotations

import pytest

from raytrain.execution.export import notes_of
from raytrain.train.state import LoopState


@pytest.mark.parametrize(
    ("step", "loss", "kind"),
    [(4, "0.25", "eval"), (8, "0.75", "eval"), (9, "0.5", "train")],
    ids=["the best evaluation", "the last evaluation", "a step without one"],
)
def test_weights_carry_the_loss_of_their_own_step(step: int, loss: str, kind: str) -> None:
    state = LoopState(step=9, best_eval_loss=0.25, best_step=4, last_eval={"step": 8, "loss": 0.75}, final_loss=0.5)
    assert notes_of(state, step=step) == {"step": str(step), "loss": loss, "loss_kind": kind}
