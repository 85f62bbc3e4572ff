"""Weights of experts that their author freezes stay frozen wherever the experts are: on hosts, moved, copied, resumed.

The author freezes them after the builder of the model has returned. Float64, the clip active; the reference is the same
job with its experts in the process.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange import Scene, act, play, session_of, weights_of_module
from gang import run_gang
from safetensors import safe_open

from raytrain.runs.folder import RunFolder

EXACT = 1e-12
STACKED = ("blocks.0.*.experts.*", "blocks.1.*.experts.w2")
"""All of one layer, and one weight of the other."""
UNEVEN = ("*.experts.runs.0.*", "blocks.1.*.experts.runs.1.b1")
"""All of the first two experts of each layer, and one bias of the third in one of them."""
WIDTHS = (("experts", (("hidden", [16, 16, 24, 8]), ("bias", True), ("activation", "swiglu"))),)
STEPS = 10
SCENES: dict[str, Scene] = {
    "2 workers, 2 hosts": Scene(2, 2, frozen=STACKED),
    "2 workers, colocated, replicas": Scene(2, "colocated", seed=5, replicas=2, frozen=STACKED),
    "2 workers, colocated, moves": Scene(2, "colocated", moves=((3, 1), (6, 2)), frozen=STACKED),
    "2 workers, colocated, widths": Scene(2, "colocated", frozen=UNEVEN, sections=WIDTHS),
    "1 worker, 3 hosts, replicas, widths": Scene(1, 3, seed=2, replicas=3, frozen=UNEVEN, sections=WIDTHS),
    "2 workers, colocated, moves of replicas, widths": Scene(
        2, "colocated", seed=4, replicas=2, moves=((3, 1), (6, 2)), frozen=UNEVEN, sections=WIDTHS
    ),
}
SCENES = {name: replace(scene, micro=4, steps=STEPS) for name, scene in SCENES.items()}
REFERENCES = {frozen: Scene(1, 0, steps=STEPS, frozen=frozen, sections=sections) for frozen, sections in (
    (STACKED, ()), (UNEVEN, WIDTHS)
)}  # fmt: skip


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, ...], dict[str, Any]]:
    return {frozen: act(0, scene) for frozen, scene in REFERENCES.items()}


def check_equal(made: list[Any], reference: dict[str, Any], *, workers: int) -> None:
    for rank in range(workers):
        for column in ("loss", "grad_norm", "eval"):
            np.testing.assert_allclose(made[rank][column], reference[column], rtol=0, atol=EXACT, err_msg=column)
    assert made[0]["weights"].keys() == reference["weights"].keys()
    for name, value in reference["weights"].items():
        np.testing.assert_allclose(made[0]["weights"][name], value, rtol=0, atol=EXACT, err_msg=name)
    assert made[0]["frozen"] == reference["frozen"], "what is given back is frozen as it was"


@pytest.mark.parametrize("name", list(SCENES))
def test_frozen_experts_stay_as_they_are_and_the_others_train_as_in_one_process(
    references: dict[tuple[str, ...], dict[str, Any]], name: str
) -> None:
    scene = SCENES[name]
    members = run_gang(play, [scene], world_size=scene.size)
    check_equal([member[0] for member in members], references[scene.frozen], workers=scene.workers)


@pytest.mark.parametrize("frozen", list(REFERENCES), ids=["stacked", "widths"])
def test_the_reference_is_worth_comparing_with(
    references: dict[tuple[str, ...], dict[str, Any]], frozen: tuple[str, ...]
) -> None:
    """Frozen weights are what they were and all others have moved; the norm without the frozen ones is clipped."""
    reference = references[frozen]
    first = weights_of_module(session_of(REFERENCES[frozen], 0).trainable.module)
    same = [name for name, value in first.items() if np.array_equal(value.numpy(), reference["weights"][name])]
    assert set(reference["frozen"]) == {name for name in same if ".experts." in name} and reference["frozen"]
    assert np.median(reference["grad_norm"]) > 0.3


def test_frozen_experts_are_saved_without_optimizer_state_and_resumed_on_other_numbers_of_hosts(
    references: dict[tuple[str, ...], dict[str, Any]], tmp_path: Path
) -> None:
    path = str(tmp_path / "run")
    saved = replace(SCENES["2 workers, 2 hosts"], every=4, run_path=path)
    run_gang(play, [saved], world_size=saved.size)
    names: set[str] = set()
    for file in Path(RunFolder(path).checkpoint_dir(4)).glob("experts-*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    states = {name for name in names if name.count(".") > 2}
    assert {name.rsplit(".", 1)[0] for name in states} == {f"1.{expert}.w1" for expert in range(4)}
    assert {name for name in names if name not in states} == {
        f"{layer}.{expert}.{weight}" for layer in range(2) for expert in range(4) for weight in ("w1", "w2")
    }
    for scene in (Scene(1, 3, frozen=STACKED), Scene(2, "colocated", frozen=STACKED)):
        again = replace(scene, steps=STEPS, from_step=4, run_path=path)
        made = [member[0] for member in run_gang(play, [again], world_size=again.size)]
        reference = references[STACKED]
        rest = {column: reference[column][4:] for column in ("loss", "grad_norm")}
        check_equal(made, {**reference, **rest}, workers=scene.workers)
