"""Layers that stay in fp32: the one that needs it is found, the loss is fp32's, and measuring leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import fragile
import pytest
import torch
from gang import run_gang
from lab import GPT, MOE, make_session, token_rows, train

from raytrain.autotune.fp32_layers import measure_layers
from raytrain.autotune.measurement import LOSS_TOLERANCE
from raytrain.train.precision import layers_of


@pytest.mark.covers("FUT-10")
def test_the_fragile_layer_is_found_and_in_fp32_the_loss_stays_within_tolerance() -> None:
    session = fragile.session_of()
    chosen, changes = measure_layers(session, "bf16")
    assert not any("forward" in vars(part) for part in session.trainable.module.modules()), "as it was before"
    assert chosen.value == [fragile.FRAGILE]
    assert f"with {fragile.FRAGILE} in fp32 the loss is in the band, 93% of 14 layers in bf16" in chosen.reason
    others = [change.score for change in changes if change.layer != fragile.FRAGILE]
    assert max(change.score for change in changes) > 5 * max(others)
    session.use(replace(session.settings, fp32_layers=tuple(chosen.value)))
    exact = fragile.losses("fp32", [])
    kept, plain = train(session)[0].losses, fragile.losses("bf16", [])
    beyond = [max(abs(one / base - 1) for one, base in zip(losses, exact, strict=True)) for losses in (kept, plain)]
    assert beyond[0] < LOSS_TOLERANCE, "a step's loss left the gate's band"
    assert beyond[1] > 5 * LOSS_TOLERANCE, "bf16 throughout does no harm here: nothing is shown"
    named = fragile.losses("bf16", [fragile.FRAGILE])
    assert named == kept, "measured or named, it is the same run"


def test_two_workers_measure_once_without_side_effects_and_decide_equally(tmp_path: Path) -> None:
    first, second = run_gang(fragile.settled, str(tmp_path / "run"), world_size=2)
    for made in (first, second):
        assert made["untouched"] and made["chosen"] == [[fragile.FRAGILE]] * 2
    (event,) = first["events"]
    assert event["kind"] == "decision" and event["what"] == "fp32_layers" and event["value"] == [fragile.FRAGILE]
    table = {row["layer"]: row for row in first["record"]["trials"]["layers"]}
    assert len(table) == 2 + 2 * fragile.DEPTH
    assert table[fragile.FRAGILE]["gradient"] > 0.1 > table["layers.3"]["gradient"] > 0
    assert table["norms.3"]["gradient"] == 0.0, "a norm computes in fp32 under autocast anyway"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("builder", ["gpt", "moe_gpt"])
def test_every_layer_of_the_built_in_models_can_stay_in_fp32(builder: str, precision: str) -> None:
    model, more = (GPT, {}) if builder == "gpt" else (MOE, {"experts": {"num_experts": 4, "top_k": 2, "hosts": 0}})
    data = {"train": token_rows(32), "eval_fraction": 0.0}
    loop = {"max_steps": 2, "micro_batch_size": 8}

    def losses(kept: list[str], dtype: str) -> list[float]:
        section = {"dtype": dtype, "fp32_layers": kept}
        return train(make_session(model, data, precision=section, loop=loop, **more))[0].losses

    exact = losses([], "fp32")
    module = make_session(model, data, loop=loop, **more).trainable.module
    names = layers_of(module, blocks=None, most=99)
    assert len(names) >= 12
    everything = [name for name, _ in module.named_children()]
    for kept in [*([name] for name in names), everything]:
        for loss, base in zip(losses(kept, precision), exact, strict=True):
            assert abs(loss / base - 1) < LOSS_TOLERANCE, kept
    assert losses(names, "fp32") == exact, "without autocast they change nothing"


def test_a_model_without_fragile_layers_stays_in_half_precision() -> None:
    section = {"dtype": "bf16", "fp32_layers": "auto"}
    session = make_session(GPT, {"train": token_rows(32), "eval_fraction": 0.0}, precision=section)
    chosen, changes = measure_layers(session, "bf16")
    assert chosen.value == [] and "in the band" in chosen.reason
    assert any(change.gradient > 0 for change in changes) and all(change.error is None for change in changes)
    assert torch.is_autocast_enabled("cpu") is False


@pytest.mark.parametrize(("room", "taken"), [(5, 4), (1, 1), (0, 0)])
def test_rows_that_fit_in_half_precision_alone_are_halved_until_fp32_has_room(room: int, taken: int) -> None:
    session = fragile.session_of()
    inner, sizes = session.trainable.loss, []
    assert session.loader.batches.micro_batch == 16

    def loss(module: torch.nn.Module, batch: Any) -> Any:
        rows = len(batch["x"])
        if not torch.is_autocast_enabled("cpu") and rows > room:
            raise torch.OutOfMemoryError("planted")
        sizes.append(rows)
        return inner(module, batch)

    session.trainable.loss = loss
    chosen, changes = measure_layers(session, "bf16")
    if not taken:
        assert (chosen.value, changes) == ([], []) and "(planted): watch the loss" in chosen.reason
        return
    assert set(sizes) == {taken} and len(changes) == 2 + 2 * fragile.DEPTH
