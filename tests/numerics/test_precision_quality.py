"""The loss in lower precisions: no difference that three seeds can show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from lab import class_rows, make_session, train
from torch import nn

SEEDS, STEPS = (1, 2, 3), 200
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Ended:
    """A finished run: evaluation loss and accuracy at its end, whether it had a loss scale, and the formats in which
    its hidden layer computed."""

    loss: float
    first_loss: float
    accuracy: float
    scaled: bool
    formats: set[torch.dtype]


def run(precision: str, seed: int) -> Ended:
    data = {"train": class_rows(400, seed=11), "eval": class_rows(3000, seed=12)}
    session = make_session(
        {"builder": "raytrain.models.mlp:mlp", "hidden": [48]},
        data,
        precision=precision,
        loop={"max_steps": STEPS, "global_batch_size": 32, "log_every": 0},
        optim={"lr": 0.01},
        seed=seed,
    )
    formats: set[torch.dtype] = set()
    hidden = next(part for part in session.trainable.module.modules() if isinstance(part, nn.Linear))
    hidden.register_forward_hook(lambda _part, _inputs, output: formats.add(output.dtype))
    first = session.evaluate(0)["loss"]
    rows, _ = train(session)
    scaled = "scaler" in session.parts() or session.step.scale.enabled
    return Ended(rows.of("eval", "loss")[-1], first, rows.of("eval", "accuracy")[-1], scaled, formats)


@pytest.fixture(scope="module")
def ended() -> dict[str, list[Ended]]:
    return {precision: [run(precision, seed) for seed in SEEDS] for precision in ("fp32", "bf16", "fp16")}


@pytest.mark.covers("PREC-02")
def test_bf16_ends_within_two_percent_of_float32_and_needs_no_scaler(ended: dict[str, list[Ended]]) -> None:
    for full, half in zip(ended["fp32"], ended["bf16"], strict=True):
        assert full.loss < 0.5 * full.first_loss, "it did not train, so nothing is shown"
        assert half.loss == pytest.approx(full.loss, rel=0.02) and half.loss != full.loss
        assert not half.scaled


@pytest.mark.covers("PREC-10")
def test_accuracy_differs_by_less_than_seeds_do(ended: dict[str, list[Ended]]) -> None:
    full = np.array([made.accuracy for made in ended["fp32"]])
    band = full.std(ddof=1)  # what another seed alone would change
    assert band > 0 and full.min() > 0.7, "chance is 0.25"
    assert all(made.formats == {torch.float32} for made in ended["fp32"])
    assert band < 0.02, "with so wide a band anything would pass"
    for precision in ("bf16", "fp16"):
        lower = np.array([made.accuracy for made in ended[precision]])
        assert abs(lower.mean() - full.mean()) < band, (precision, lower, full)
        assert all(made.formats == {FORMATS[precision]} for made in ended[precision]), "it was not in force"
        assert {made.scaled for made in ended[precision]} == {precision == "fp16"}
