"""ARCHITECTURE.md, 4 to 8: experts in one process, on hosts, and partitioned over the workers train equally.

Float64 over gloo, clip active, ragged rows, windows that do not divide, micro-batches without a label, and an
evaluation in between, all to the last digits. The reference is the same job with its experts in the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange import Scene, act, play
from gang import run_gang

from experts.member.checkpoint import locate
from raytrain.checkpoint.reader import read_manifest
from raytrain.errors import CheckpointError
from raytrain.runs.folder import RunFolder

EXACT = 1e-12
COLUMNS = ("loss", "aux_loss", "grad_norm", "eval", "counts", "load_imbalance")
PLAIN: dict[str, Scene] = {
    "1 worker, 1 host": Scene(1, 1),
    "1 worker, 2 hosts": Scene(1, 2),
    "1 worker, 4 hosts": Scene(1, 4),
    "2 workers, 1 host": Scene(2, 1),
    "2 workers, 3 hosts": Scene(2, 3),
    "1 worker, colocated": Scene(1, "colocated"),
    "2 workers, colocated": Scene(2, "colocated"),
    "3 workers, colocated": Scene(3, "colocated"),
    "1 worker, 3 hosts, drawn placement": Scene(1, 3, seed=1),
    "2 workers, 3 hosts, drawn placement with replicas": Scene(2, 3, seed=2, replicas=3),
    "1 worker, 4 hosts, drawn placement with replicas": Scene(1, 4, seed=3, replicas=5),
    "2 workers, colocated, drawn placement with replicas": Scene(2, "colocated", seed=5, replicas=2),
}
"""Micro-batches of 4 rows in windows of 12: accumulation 3 on one worker, 2 and 1 on two."""
ROW_BY_ROW = {
    "2 workers, 2 hosts, row by row": Scene(2, 2, micro=1),
    "2 workers, colocated, row by row": Scene(2, "colocated", micro=1),
}
"""Two rows have no label: the worker that has one does not run it, and takes part in the other worker's pass."""
ONE_PASS = {"1 worker, 2 hosts": Scene(1, 2, micro=12), "2 workers, 2 hosts": Scene(2, 2, micro=6)}


def played(scenes: dict[str, Scene]) -> dict[str, list[Any]]:
    """What the members made of each scene; scenes of one size share their processes."""
    made: dict[str, list[Any]] = {}
    for size in sorted({scene.size for scene in scenes.values()}):
        group = {name: scene for name, scene in scenes.items() if scene.size == size}
        members = run_gang(play, list(group.values()), world_size=size)
        made |= {name: [member[index] for member in members] for index, name in enumerate(group)}
    return made


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return played(PLAIN)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return act(0, Scene(1, 0))


def check_equal(made: list[Any], reference: dict[str, Any], *, workers: int, where: str) -> None:
    """Every worker's record is the reference's, and rank 0 holds the same weights."""
    for rank in range(workers):
        for column in COLUMNS:
            np.testing.assert_allclose(
                made[rank][column], reference[column], rtol=0, atol=EXACT, err_msg=f"{where}, rank {rank}: {column}"
            )
    weights = made[0]["weights"]
    assert weights.keys() == reference["weights"].keys()
    for name, value in reference["weights"].items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=EXACT, err_msg=f"{where}: {name}")


@pytest.mark.parametrize("name", list(PLAIN))
def test_twenty_steps_are_the_same_for_every_placement_of_experts(
    runs: dict[str, list[Any]], reference: dict[str, Any], name: str
) -> None:
    check_equal(runs[name], reference, workers=PLAIN[name].workers, where=name)


@pytest.fixture(scope="module")
def row_by_row() -> dict[str, list[Any]]:
    return played(ROW_BY_ROW)


@pytest.mark.parametrize("name", list(ROW_BY_ROW))
def test_a_micro_batch_without_a_label_leaves_the_passes_of_the_others_as_they_are(
    row_by_row: dict[str, list[Any]], reference: dict[str, Any], name: str
) -> None:
    check_equal(row_by_row[name], reference, workers=2, where=name)


def test_the_reference_is_worth_comparing_with(reference: dict[str, Any]) -> None:
    """It learns, it clips, it evaluates, and its experts differ in load."""
    assert reference["loss"][-1] < 0.9 * reference["loss"][0] and len(reference["loss"]) == 20
    assert np.median(reference["grad_norm"]) > 0.3, "the clip was hardly ever active"
    assert len(reference["eval"]) >= 2 and max(reference["load_imbalance"]) > 1.1


def test_the_norm_is_the_same_to_the_last_bit_for_any_placement_without_replicas(runs: dict[str, list[Any]]) -> None:
    """ARCHITECTURE.md, 5: one slot in the vote for each expert, added up in the order of the experts."""
    one_worker = ("1 worker, 1 host", "1 worker, 2 hosts", "1 worker, 4 hosts", "1 worker, 3 hosts, drawn placement")
    norms = {tuple(runs[name][0]["grad_norm"]) for name in one_worker}
    assert len(norms) == 1


def test_hosts_hold_the_experts_of_the_placement_and_some_none(runs: dict[str, list[Any]]) -> None:
    held = [member["held"] for member in runs["1 worker, 4 hosts, drawn placement with replicas"][1:]]
    keys = [tuple(key) for host in held for key in host]
    assert len(set(keys)) == 8 and len(keys) > 8, "two layers of four experts, some of them twice"
    per_layer = [{layer for layer, _ in host} for host in held]
    assert any(len(layers) < 2 for layers in per_layer), "no host was without an expert in some layer"
    assert all(member["steps"] == 20 for member in runs["1 worker, 2 hosts"][1:])


@pytest.mark.covers("EXP-10")
def test_the_router_stays_with_the_workers_and_is_the_same_on_all_of_them(runs: dict[str, list[Any]]) -> None:
    for name in ("2 workers, 3 hosts", "2 workers, 3 hosts, drawn placement with replicas", "3 workers, colocated"):
        scene = PLAIN[name]
        first, *others = [member["routers"] for member in runs[name][: scene.workers]]
        assert len(first) == 2 and all(value.any() for value in first.values())
        for other in others:
            assert all(np.array_equal(first[key], other[key]) for key in first), name
        for host in runs[name][scene.workers :]:
            assert host["names"] <= {"w1", "w2"}, f"{name}: a host holds {host['names']}"


def test_one_micro_batch_a_step_is_the_same_step(reference: dict[str, Any]) -> None:
    for name, made in played(ONE_PASS).items():
        check_equal(made, reference, workers=ONE_PASS[name].workers, where=name)


VARIANTS: dict[str, tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]] = {
    "swiglu, sigmoid, shared expert": (
        ("experts", (("activation", "swiglu"), ("score", "sigmoid"), ("shared_expert", True))),
    ),
    "capacity 0.75, temperature 0.3": (("experts", (("capacity_factor", 0.75), ("temperature", 0.3))),),
    "activation checkpointing": (("loop", (("activation_checkpointing", True),)),),
    "every second block computed again": (("loop", (("activation_checkpointing", 2),)),),
    "sgd": (("optim", (("name", "sgd"), ("lr", 0.05))),),
    "muon": (("optim", (("name", "muon"), ("lr", 0.01))), ("experts", (("bias", True),))),
    "eight experts, top 3": (("experts", (("num_experts", 8), ("top_k", 3), ("hidden", 24))),),
    "relu and biases, gated shared expert": (
        ("experts", (("activation", "relu"), ("bias", True), ("shared_expert", True), ("shared_gate", True))),
    ),
    "experts of four sizes": (
        ("experts", (("num_experts", 5), ("hidden", [24, 24, 8, 40, 16]), ("activation", "swiglu"), ("bias", True))),
    ),
}
DRAWN = "experts of four sizes"
"""Also in a drawn placement with replicas, where a host holds other sizes than the next."""


@pytest.fixture(scope="module")
def variants() -> dict[str, list[Any]]:
    hosts = {f"{name}, on hosts": Scene(1, 2, sections=sections, steps=8) for name, sections in VARIANTS.items()}
    shared = {f"{name}, colocated": Scene(2, "colocated", sections=s, steps=8) for name, s in VARIANTS.items()}
    drawn = {
        f"{DRAWN}, drawn, on hosts": Scene(1, 2, seed=4, replicas=2, sections=VARIANTS[DRAWN], steps=8),
        f"{DRAWN}, drawn, colocated": Scene(2, "colocated", seed=6, replicas=2, sections=VARIANTS[DRAWN], steps=8),
    }
    return played(hosts | shared | drawn)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_kind_of_router_expert_and_optimizer(variants: dict[str, list[Any]], name: str) -> None:
    reference = act(0, Scene(1, 0, sections=VARIANTS[name], steps=8))
    check_equal(variants[f"{name}, on hosts"], reference, workers=1, where=f"{name}, on hosts")
    check_equal(variants[f"{name}, colocated"], reference, workers=2, where=f"{name}, colocated")
    if name == DRAWN:
        check_equal(variants[f"{name}, drawn, on hosts"], reference, workers=1, where=f"{name}, drawn, on hosts")
        check_equal(variants[f"{name}, drawn, colocated"], reference, workers=2, where=f"{name}, drawn, colocated")


@pytest.mark.parametrize("where", ["worker", "expert"])
def test_an_overflow_anywhere_is_skipped_by_everybody_and_halves_the_scale_once(where: str) -> None:
    """ARCHITECTURE.md, 6, in fp16: planted in the last worker's trunk gradient, and in an expert's, on its host."""
    alone = act(0, Scene(1, 0, steps=8, precision="fp16", inject=(where, 4)))
    hosts = run_gang(play, [Scene(2, 2, steps=8, precision="fp16", inject=(where, 4))], world_size=4)
    for made in [alone, *(member[0] for member in hosts[:2])]:
        assert made["loss_scale"][:3] == [65536.0] * 3 and made["loss_scale"][4:] == [32768.0] * 4
        assert not np.isfinite(made["grad_norm"][3]) and np.isfinite(made["grad_norm"][4:]).all()
        np.testing.assert_allclose(made["loss"], alone["loss"], rtol=2e-3)
    for name, value in alone["weights"].items():
        assert np.isfinite(value).all()
        if name.endswith(("bias_E", "shares_E")):  # signs and shares of counts: rounding may route one token otherwise
            continue
        apart = np.abs(hosts[0][0]["weights"][name] - value)  # AdamW turns rounding of a tiny gradient into a step
        assert apart.mean() < 1e-4, name


@pytest.mark.parametrize("where", ["worker", "expert"])
def test_what_was_not_finite_is_named_also_on_a_host(where: str) -> None:
    (local,) = act(0, Scene(1, 0, steps=3, inject=(where, 2)))["nonfinite"]
    assert local.startswith("the gradients of ") and (".experts." in local) is (where == "expert")
    made = run_gang(play, [Scene(1, 2, steps=3, inject=(where, 2))], world_size=3)
    named = "the gradients of expert 0 of layer 0 on expert host 0" if where == "expert" else local
    assert made[0][0]["nonfinite"] == [named]


def test_a_checkpoint_of_three_hosts_loads_on_any_number(tmp_path: Path) -> None:
    """ARCHITECTURE.md, 8: the same weights, moments and series, on 2 and on 5 hosts, and shared out over two workers.

    With experts of four sizes and with biases, so that they cannot be treated as one stack of matrices.
    """
    run, sections = str(tmp_path / "run"), VARIANTS[DRAWN]
    (first,) = run_gang(play, [Scene(1, 3, steps=12, sections=sections, run_path=run, every=5)], world_size=4)[0]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints" / "step_00000005").iterdir()) == [
        "COMPLETE", "experts-00000.safetensors", "experts-00001.safetensors", "experts-00002.safetensors",
        "manifest.json", "model.safetensors", "optimizer.safetensors", "part_load.safetensors", "rng.safetensors",
        "state.json",
    ]  # fmt: skip
    for name, scene in {
        "2 hosts": Scene(1, 2, steps=12, sections=sections, run_path=run, from_step=5),
        "5 hosts": Scene(1, 5, steps=12, sections=sections, run_path=run, from_step=10),
        "colocated": Scene(2, "colocated", steps=12, sections=sections, run_path=run, from_step=5, micro=2),
    }.items():
        made = run_gang(play, [scene], world_size=scene.size)[0][0]
        rows = first["loss"][scene.from_step :]
        np.testing.assert_allclose(made["loss"], rows, rtol=0, atol=EXACT, err_msg=name)
        for key, value in first["weights"].items():
            np.testing.assert_allclose(made["weights"][key], value, rtol=0, atol=EXACT, err_msg=f"{name}: {key}")


def test_a_checkpoint_with_a_missing_or_doubled_expert_is_refused_by_name(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    run_gang(play, [Scene(1, 2, steps=4, run_path=run, every=4)], world_size=3)
    folder = RunFolder(run).checkpoint_dir(4)
    manifest = read_manifest(folder)
    located = locate(manifest, [4, 4])
    assert len(located) == 8 and set(located.values()) == {"experts-00000.safetensors", "experts-00001.safetensors"}
    lost = {**manifest, "experts": {name: keys[1:] for name, keys in manifest["experts"].items()}}
    with pytest.raises(CheckpointError, match="layer 0 expert 0 is missing"):
        locate(lost, [4, 4])
    twice = {**manifest, "experts": {**manifest["experts"], "other.safetensors": [[1, 3]]}}
    with pytest.raises(CheckpointError, match=r"layer 1 expert 3 occurs twice: in experts-00001\.safe"):
        locate(twice, [4, 4])
    with pytest.raises(CheckpointError, match=r"layer 1 expert 3 in experts-00001\.safetensors is not in the model"):
        locate(manifest, [4, 3])
