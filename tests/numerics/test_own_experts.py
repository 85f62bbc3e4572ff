"""Users' models around MoELayers train the same with the experts in the process and shared out, or say what is not."""

from __future__ import annotations

from typing import Any

import guest_experts
import numpy as np
import pytest
import torch
from gang import run_gang
from guest_experts import failed, record, same, session_of, trained
from torch.nn import functional as F

from raytrain.data.rows.batches import Cursor, rank_micro_batches
from raytrain.errors import InputError
from raytrain.train.compile import CompiledParts

BUILDER = {"builder": "guest_experts:build"}
ROW_BY_ROW = {"loop": {"micro_batch_size": 1}}
"""Seven rows on two workers: one has four passes, the other three."""
AGAIN = {"loop": {"micro_batch_size": 1, "activation_checkpointing": True}}
ADAMW = {"optim": {"name": "adamw", "weight_decay": 0.1, "lr": 0.05, "max_grad_norm": 0.3}}
UNEQUAL = [
    ({**BUILDER, "kind": "Net"}, ROW_BY_ROW),
    ({**BUILDER, "kind": "Again"}, ROW_BY_ROW),
    ({**BUILDER, "kind": "NoGrad"}, ROW_BY_ROW),
    ({**BUILDER, "kind": "Twice"}, ROW_BY_ROW),
    ({**BUILDER, "kind": "Again"}, AGAIN),
    ({**BUILDER, "kind": "Twice"}, AGAIN),
    ({**BUILDER, "kind": "Checkpointed", "communicates": True}, ROW_BY_ROW),
    ({**BUILDER, "kind": "Attributes"}, ROW_BY_ROW),
]


@pytest.fixture(scope="module")
def unequal() -> list[list[dict[str, Any]]]:
    return run_gang(trained, UNEQUAL, world_size=2)


@pytest.mark.parametrize("number", range(len(UNEQUAL)), ids=[f"{model['kind']}" for model, _ in UNEQUAL])
def test_workers_with_unequal_passes_call_the_layers_alike(unequal: list[list[dict[str, Any]]], number: int) -> None:
    model, sections = UNEQUAL[number]
    whole = record(session_of(model, loop=sections["loop"]))
    for member in unequal:
        assert member[number]["loss"] == unequal[0][number]["loss"]
    same(unequal[0][number], whole)


def test_a_layer_that_only_some_micro_batches_call_is_named_with_the_rule_on_every_worker() -> None:
    ends = run_gang(failed, {**BUILDER, "kind": "Branches"}, ROW_BY_ROW, world_size=2, timeout=60.0)
    assert all(ends)
    told = next(end for end in ends if "HeaderMismatch" in end)
    assert "layers.1" in told and "every worker calls every expert layer equally often in every micro-batch" in told
    assert "experts.hosts 0" in told


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Penalty", r"reads the weights of the experts of layers\.0"),
        ("ListedPenalty", r"reads the weights of the experts of layers\.[01]"),
        ("NamedPenalty", r"reads the weights of the experts of layers\.1"),
        ("GradientPenalty", r"torch\.autograd\.grad through the experts of layers\.1"),
        ("Adversarial", r"torch\.autograd\.grad through the experts of layers\.1"),
    ],
)
def test_a_loss_that_would_miss_the_experts_is_refused_in_the_first_step(kind: str, said: str) -> None:
    record(session_of({**BUILDER, "kind": kind}))
    with pytest.raises(InputError, match=said) as caught:
        record(session_of({**BUILDER, "kind": kind}, "colocated"))
    assert "experts.hosts 0" in str(caught.value)


def test_a_function_between_steps_that_would_miss_the_experts_is_refused() -> None:
    record(session_of({**BUILDER, "kind": "Net", "reads": True}))
    with pytest.raises(InputError, match=r"reads the weights of the experts of layers\.0"):
        record(session_of({**BUILDER, "kind": "Net", "reads": True}, "colocated"))


@pytest.mark.parametrize("kind", ["Net", "Again", "NoGrad"])
def test_the_experts_of_a_layer_without_gradients_stay_as_they_are(kind: str) -> None:
    """As in a plain loop, whose optimizer finds no gradients: neither weight decay nor momentum moves them."""
    net = guest_experts.all_rows(kind)
    groups = [{"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.99))
    batch = {name: value.double() for name, value in guest_experts.rows().items()}
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = net(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        losses.append(loss.item())
    loop = {"global_batch_size": 14, "micro_batch_size": 14}
    session = session_of({**BUILDER, "kind": kind}, "colocated", loop=loop, **ADAMW)
    first = {name: value.clone() for name, value in guest_experts.all_rows(kind).state_dict().items()}
    found = record(session)
    np.testing.assert_allclose(found["loss"], losses, rtol=0, atol=1e-9)
    moved = {name for name, value in first.items() if not np.array_equal(value.numpy(), found["weights"][name])}
    for name in (name for name in first if ".experts." in name):
        wanted = dict(net.named_parameters())[name].detach().numpy()
        np.testing.assert_allclose(found["weights"][name], wanted, rtol=0, atol=1e-9, err_msg=name)
        unused = {"Net": (), "Again": ("layers.1",), "NoGrad": ("layers.0",)}[kind]
        assert (name in moved) != name.startswith(tuple(unused) or "none")


def test_a_compiler_may_list_the_parameters_that_a_loss_may_not() -> None:
    session = session_of({**BUILDER, "kind": "Net"}, "colocated")
    layer: Any = session.trainable.module.layers[0]
    compiled = CompiledParts([("layers.0", layer)], mode="default", lower=lambda graph, _inputs: graph)
    found = record(session)
    assert compiled.parts[0].graphs > 0
    same(found, record(session_of({**BUILDER, "kind": "Net"})))


def test_the_model_that_is_given_back_has_the_parameters_and_attributes_that_left() -> None:
    session = session_of({**BUILDER, "kind": "Attributes"}, "colocated")
    layer: Any = session.trainable.module.layers[0]
    given = layer.experts._given[0]
    listed = list(given.parameters())
    given.w1.note = "mine"
    record(session)
    assert layer.experts is given and layer.experts.gain == 0.7 and layer.experts.w1.note == "mine"
    assert all(one is other for one, other in zip(given.parameters(), listed, strict=True))
    y, _ = layer(torch.randn(2, 3, 8, dtype=torch.float64))
    y.sum().backward()
    assert layer.experts.w1.grad is not None, "a guard of the training was left"


def test_a_model_that_gathers_over_the_workers_runs_equally_many_passes_on_each() -> None:
    """Rows of one pass, four and three, meet in one loss; a worker without rows takes part with one that has no weight.

    The reference is one process that computes the losses of both workers in each pass.
    """
    model = {"builder": "guest_experts:gathers", "communicates": True}
    first, second = (made[0] for made in run_gang(trained, [(model, {"loop": {"micro_batch_size": 1}})], world_size=2))
    assert first["loss"] == second["loss"] and len(first["loss"]) == 4
    for name, value in first["weights"].items():
        np.testing.assert_array_equal(value, second["weights"][name])
    session = session_of({**model, "communicates": False}, loop={"micro_batch_size": 1})
    module: Any = session.trainable.module
    losses = simulated(session, module)
    np.testing.assert_allclose(first["loss"], losses, rtol=0, atol=1e-12)
    for name, value in module.state_dict().items():
        np.testing.assert_allclose(first["weights"][name], value.numpy(), rtol=0, atol=1e-12, err_msg=name)


def simulated(session: Any, module: Any) -> list[float]:
    """Both workers' passes of each step in one graph; the filler is the first row of the data, with weight zero."""
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    data = guest_experts.rows()["x"].double()
    batches, cursor = session.loader.batches, Cursor(epoch=0, position=0)
    for _ in range(4):
        indices, cursor = batches.global_batch(cursor)
        rows = [np.concatenate(rank_micro_batches(indices, micro_batch=1, rank=r, world_size=2)) for r in range(2)]
        assert sorted(map(len, rows)) == [3, 4]
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for turn in range(4):
            pairs = [(data[part[turn : turn + 1]], 1 / 7) if turn < len(part) else (data[:1], 0.0) for part in rows]
            each = [[F.normalize(layer(x), dim=1) for layer in module.layers] for x, _ in pairs]
            every = torch.cat([F.pad(theirs, (0, 0, 0, 3)) for _, theirs in each])
            for rank, ((mine, _), (_, weight)) in enumerate(zip(each, pairs, strict=True)):
                total = total + weight * F.cross_entropy(5 * mine @ every.T, torch.tensor([4 * rank]))
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses
