"""What forward changes besides buffers: parameters, and the statistics of batch norms of any class; several workers
against one plain loop over the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import changing
import pytest
import torch
from gang import run_gang
from torch import nn

from raytrain.errors import InputError
from raytrain.train.module_checks import check_module
from raytrain.train.parallel.buffers import ForwardChanges
from raytrain.train.parallel.sync_batchnorm import synchronize
from raytrain.train.placing import may_change
from raytrain.trainable import Trainable

SYNCED: dict[str, Any] = {"scale": {"sync_batchnorm": True}}
ARRANGEMENTS = {  # of 14 rows, at most 7 of them in a micro-batch: of three workers one has none
    "two": (2, "data_parallel"),
    "three": (3, "data_parallel"),
    "two sharded": (2, "fsdp"),
    "three sharded": (3, "fsdp"),
    "one sharded": (1, "fsdp"),
}


def compared(name: str, world: int, strategy: str, sections: dict[str, Any], *, evaluated: bool = False) -> list[Any]:
    """Train, compare with the plain loop, and return what each rank made."""
    loop = {"micro_batch_size": 7} | sections.get("loop", {})
    scale = {"strategy": strategy} | sections.get("scale", {})
    ranks = run_gang(changing.evaluated if evaluated else changing.trained, name, {"loop": loop, "scale": scale},
                     world_size=world)  # fmt: skip
    plain = changing.by_torch(name, evaluated=evaluated)
    assert ranks[0]["losses"] == pytest.approx(plain["losses"], rel=1e-9)
    for key, expected in plain["state"].items():
        assert ranks[0]["state"][key] == pytest.approx(expected, abs=1e-9), key
    for other in ranks[1:] if strategy == "data_parallel" else ():
        assert other["state"] == ranks[0]["state"]
    return ranks


# ---------------------------------------------------------------- batch norms


@pytest.mark.parametrize("name", [name for name in changing.NORMS if name != "own maths"])
def test_synchronized_batch_norms_of_any_class_do_what_one_worker_does(name: str) -> None:
    compared(name, 3, "data_parallel", SYNCED)


@pytest.mark.parametrize(("name", "strategy"), [("written", "fsdp"), ("partly frozen", "fsdp")])
def test_they_do_so_sharded(name: str, strategy: str) -> None:
    compared(name, 3, strategy, SYNCED)


@pytest.mark.parametrize("name", ["activated", "cumulative", "partly frozen"])
def test_they_do_so_recomputed(name: str) -> None:
    compared(name, 3, "data_parallel", SYNCED | {"loop": {"activation_checkpointing": True}})


def test_a_batch_norm_with_its_own_maths_is_refused_by_name() -> None:
    refused = run_gang(changing.refused, "own maths", SYNCED | {"loop": {"micro_batch_size": 7}}, world_size=2)
    for text in refused:
        assert text.startswith("scale.sync_batchnorm: got true with the batch norm layers.0.1 (OwnMaths)")


def test_torchs_own_synchronized_batch_norm_needs_the_key() -> None:
    (text, other) = run_gang(changing.refused, "torch's", {"loop": {"micro_batch_size": 7}}, world_size=2)
    assert text == other and text.startswith("scale.sync_batchnorm: got false with torch.nn.SyncBatchNorm (layers.0.1")


def test_a_batch_norm_of_timm_keeps_its_forward() -> None:
    layers = pytest.importorskip("timm.layers")
    torch.manual_seed(0)
    norm = layers.BatchNormAct2d(3).double()
    plain = layers.BatchNormAct2d(3).double()
    plain.load_state_dict(norm.state_dict())
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    synchronize(norm, workers=changing.TwoAlike())
    found = norm(x)
    expected = plain(torch.cat([x, x]))[:4]
    assert torch.allclose(found, expected, rtol=0, atol=1e-12) and float(found.detach().min()) == 0.0
    for name, buffer in plain.named_buffers():
        assert torch.allclose(norm.get_buffer(name), buffer, rtol=0, atol=1e-12), name


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", list(changing.TEACHERS))
def test_a_parameter_that_forward_changes_is_the_same_on_every_worker(name: str) -> None:
    (first, *_) = compared(name, 3, "data_parallel", {})  # the third worker has no rows, so its own stays behind
    moved = {"projected": {"head.weight"}, "scaled": {"teacher.weight"}}.get(name, {"teacher.weight", "teacher.bias"})
    assert {one for names in first["sent"] for one in names} == moved


def test_a_resumed_run_has_the_teacher_of_the_unbroken_one(tmp_path: Path) -> None:
    sections = {"loop": {"micro_batch_size": 7}}
    whole = run_gang(changing.trained, "assigned", sections, str(tmp_path / "run"), world_size=3)
    rest = run_gang(changing.resumed, "assigned", sections, str(tmp_path / "run"), 2, world_size=3)
    assert rest[0]["losses"] == whole[0]["losses"][2:]
    assert [rank["state"] for rank in rest] == [rank["state"] for rank in whole]


@pytest.mark.parametrize("name", ["in place", "assigned", "late", "projected"])
def test_a_sharded_model_refuses_a_forward_that_changes_parameters(name: str) -> None:
    sections = {"scale": {"strategy": "fsdp"}, "loop": {"micro_batch_size": 7}}
    for text in run_gang(changing.refused, name, sections, world_size=1):
        which = "head.weight" if name == "projected" else "teacher."
        assert text.startswith(f"scale.strategy: got fsdp with a forward that changes the parameter {which}"), text


def test_a_frozen_base_with_small_adapters_is_never_copied() -> None:
    base = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2))
    assert may_change(base) == []
    taught = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
    assert [id(one) for one in may_change(taught)] == [id(one) for one in taught[0].parameters()]


# ---------------------------------------------------------------- embeddings with max_norm


@pytest.mark.parametrize("arrangement", list(ARRANGEMENTS))
@pytest.mark.parametrize("name", list(changing.EMBEDDINGS))
def test_max_norm_limits_every_row_that_any_worker_looks_up(name: str, arrangement: str) -> None:
    compared(name, *ARRANGEMENTS[arrangement], {})


@pytest.mark.parametrize("arrangement", ["two", "three sharded"])
def test_max_norm_limits_what_an_evaluation_looks_up(arrangement: str) -> None:
    compared("euclidean", *ARRANGEMENTS[arrangement], {}, evaluated=True)


def test_rows_of_a_measurement_do_not_count() -> None:
    layer = nn.Embedding(5, 3, max_norm=0.1)
    changes = ForwardChanges(layer, workers=changing.TwoAlike())
    before = layer.weight.detach().clone()
    layer(torch.tensor([1]))
    with torch.no_grad():
        layer.weight.copy_(before)  # as after a probe
    changes.before_passes()
    layer(torch.tensor([2, 2]))
    with changes.not_counted():
        layer(torch.tensor([3]))
    changes.after_passes()
    changed = (layer.weight != before).any(1).tolist()
    assert changed == [False, False, True, False, False]


def test_a_row_is_limited_once_however_often_it_is_looked_up() -> None:
    """Each further time changes the last bits of some rows, and workers look up a row in more or fewer passes."""
    layer = nn.Embedding(400, 3, max_norm=0.1)
    once = layer.weight.detach().clone()
    torch.embedding_renorm_(once, torch.arange(400), 0.1, 2.0)
    changes = ForwardChanges(layer, workers=changing.TwoAlike())
    changes.before_passes()
    for _ in range(4):
        layer(torch.arange(400))
    assert not torch.equal(layer.weight, once)
    changes.after_passes()
    assert torch.equal(layer.weight, once)


def test_a_second_session_of_a_module_replaces_the_hooks_of_the_first() -> None:
    layer = nn.Embedding(5, 3, max_norm=0.1)
    for _ in range(3):
        ForwardChanges(layer, workers=changing.TwoAlike())
    assert len(layer._forward_pre_hooks) == 1


def test_a_sharded_weight_with_max_norm_cannot_be_tied_to_a_head() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    trainable = Trainable.from_module(model, loss=lambda module, batch: module(batch["x"]).sum())
    check_module(trainable, key="model.module", strategy="data_parallel")
    with pytest.raises(InputError, match=r"scale\.strategy: got fsdp with layers that share the weight"):
        check_module(trainable, key="model.module", strategy="fsdp")
