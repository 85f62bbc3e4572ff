"""Which layers stay in fp32: the pure decision."""

from __future__ import annotations

import json
import math

import pytest

from raytrain.autotune.fp32_layers import LayerChange, choose_layers
from raytrain.autotune.measurement import LOSS_TOLERANCE, NORM_BAND, outside_band

NAMES = [f"layer{number}" for number in range(10)]


def changes(fragile: dict[str, float]) -> list[LayerChange]:
    """Ten layers that change the loss a little, more with their number, and some a lot."""
    return [LayerChange(name, fragile.get(name, 1e-4 * n), 1e-3) for n, name in enumerate(NAMES, 1)]


@pytest.mark.parametrize("needed", range(11))
def test_the_fewest_of_the_most_sensitive_are_kept(needed: int) -> None:
    asked: list[int] = []

    def refusal(kept: list[str]) -> str:
        asked.append(len(kept))
        return "" if len(kept) >= needed else "the loss is 9 where fp32 has 1"

    made = choose_layers(changes({}), refusal, precision="bf16")
    assert made.value == NAMES[::-1][:needed]
    assert len(asked) <= 2 * math.log2(10) + 2, "the whole model was measured too often"


def test_the_reason_names_the_layers_their_share_and_the_error_without_them() -> None:
    fragile = changes({"layer3": 0.5, "layer7": math.nan})
    made = choose_layers(fragile, lambda kept: "" if len(kept) >= 2 else "the loss is not finite", precision="fp16")
    assert made.value == ["layer7", "layer3"], "one that is not finite is the most sensitive"
    assert "with layer7, layer3 in fp32" in made.reason and "80% of 10 layers in fp16" in made.reason
    assert "with none the loss is not finite" in made.reason


def test_no_layer_stays_in_fp32_if_none_breaks_and_all_do_if_one_does_not_help() -> None:
    assert choose_layers(changes({}), lambda kept: "", precision="bf16").value == []
    made = choose_layers(changes({}), lambda kept: "the loss is not finite", precision="bf16")
    assert len(made.value) == 10 and "not in a layer" in made.reason
    still = [LayerChange(name, 0.0, 0.0) for name in NAMES]
    assert choose_layers(still, lambda kept: "bad", precision="bf16").value == [], "layers it does not touch"


def test_the_band_is_the_gates() -> None:
    inside = 2.0, 1.0
    assert outside_band((2.0 * (1 + 0.9 * LOSS_TOLERANCE), 1.2), inside, 0.19) == ""
    assert "loss is" in outside_band((2.0 * (1 + 1.1 * LOSS_TOLERANCE), 1.0), inside)
    assert "norm" in outside_band((2.0, 1.01 * NORM_BAND[1]), inside) and outside_band((2.0, 0.79), inside)
    assert "gradient differs from fp32's by 21%" in outside_band((2.0, 1.0), inside, 0.21)
    assert "not finite" in outside_band((math.nan, 1.0), inside) and outside_band((2.0, math.inf), inside)
    assert outside_band((2.0, 5.0), (2.0, 0.0), 9.0) == ""


def test_records_are_valid_json() -> None:
    row = LayerChange("a", math.nan, math.inf, "no kernel").to_json()
    assert json.loads(json.dumps(row, allow_nan=False)) == {
        "layer": "a", "loss": None, "gradient": None, "error": "no kernel"
    }  # fmt: skip
    assert LayerChange("a", 0.0, 0.0, "no kernel").score == math.inf
