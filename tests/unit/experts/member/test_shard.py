"""A host's experts: state that moves, state that stays, and the next optimizer step."""

from __future__ import annotations

import hashlib

import pytest
import torch

from experts.config import Key, LayerShape
from experts.member.moves import _digest, _pack, _unpack
from experts.member.shard import CommitDecision, ExpertShard, _counts_on
from experts.placement.values import LayerPlacement, Placement
from raytrain.config.sections import OptimConfig
from raytrain.train.parallel.flat_gradients import sum_of_squares

SHAPES = [LayerShape(16, (16, 16, 32), "gelu", bias=True), LayerShape(16, (16, 16), "swiglu")]
"""Sizes that fill the CPU's vectors: torch's fused AdamW rounds a remainder differently, so the last bit of an expert
of odd sizes could depend on its neighbours in the stack."""


def placed(version: int, *layers: tuple[tuple[int, ...], ...]) -> Placement:
    """Hosts of each expert of each layer, home first; copies take equal parts."""
    made = [LayerPlacement(copies, tuple((1 / len(held),) * len(held) for held in copies)) for copies in layers]
    return Placement(version, 2, tuple(made))


BEFORE = placed(1, ((0,), (0,), (1,)), ((1,), (0, 1)))
AFTER = placed(2, ((0,), (1,), (1,)), ((1,), (1, 0)))


def shard_of(placement: Placement, host: int) -> ExpertShard:
    """Drawn weights, the same for an expert wherever it is, and one step of AdamW."""
    shard = ExpertShard(SHAPES, placement, host, optim=OptimConfig(), dtype=torch.float64, device=torch.device("cpu"))
    for layer, expert in shard.held():
        draw = torch.Generator().manual_seed(10 * layer + expert)
        for view in shard.weights_of((layer, expert)).values():
            view.copy_(torch.randn(view.shape, generator=draw, dtype=torch.float64))
    step(shard)
    return shard


def step(shard: ExpertShard) -> None:
    """Give each expert at home its own gradient, and commit."""
    for layer, expert in shard.homes():
        draw = torch.Generator().manual_seed(100 + 10 * layer + expert)
        for grad in shard.layers[layer].gradients_of(expert).values():
            grad.copy_(torch.randn(grad.shape, generator=draw, dtype=torch.float64))
    shard.commit(CommitDecision(skip=False, coefficient=0.5, inverse_scale=1.0, lr=0.1))


def hashes(shard: ExpertShard) -> dict[Key, str]:
    """Hashes of weights and optimizer state of each expert at home."""
    found = {}
    for key in shard.homes():
        digest = hashlib.sha256()
        for name, value in sorted(shard.state_of(key).items()):
            digest.update(name.encode() + value.contiguous().numpy().tobytes())
        found[key] = digest.hexdigest()
    return found


@pytest.mark.covers("EXP-09")
def test_a_move_carries_weights_and_optimizer_state_to_the_last_bit() -> None:
    old, new = shard_of(BEFORE, 0), shard_of(BEFORE, 1)
    before = hashes(old) | hashes(new)
    assert set(before) == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}
    assert "w1.exp_avg" in old.state_of((0, 1)) and "b1.exp_avg_sq" in old.state_of((0, 1))
    data, arrived = _pack(old, [(0, 1), (1, 1)]), {}
    assert _unpack(data, _digest(data), into=arrived)
    old.switch(AFTER, {})
    new.switch(AFTER, arrived)
    assert set(hashes(old)) == {(0, 0)} and set(hashes(new)) == {(0, 1), (0, 2), (1, 0), (1, 1)}
    assert hashes(old) | hashes(new) == before
    for shard in (old, new):
        step(shard)
    stayed = [shard_of(BEFORE, host) for host in range(2)]
    for shard in stayed:
        step(shard)
    assert hashes(old) | hashes(new) == hashes(stayed[0]) | hashes(stayed[1]), "the next step differs"


def test_a_replica_promoted_to_home_keeps_its_gradient_and_removed_experts_free_their_slots() -> None:
    shard = shard_of(BEFORE, 1)
    for grad in shard.layers[1].gradients_of(1).values():
        grad.fill_(3.0)
    for grad in shard.layers[0].gradients_of(2).values():
        grad.fill_(5.0)
    state = {name: value.clone() for name, value in shard_of(BEFORE, 0).state_of((1, 1)).items()}
    shard.switch(placed(2, ((0,), (0,), (1,)), ((0,), (1,))), {(1, 1): state})
    assert shard.held() == [(0, 2), (1, 1)]
    assert all((grad == 3.0).all() for grad in shard.layers[1].gradients_of(1).values())
    assert all((grad == 5.0).all() for grad in shard.layers[0].gradients_of(2).values()), "another layer's were lost"


@pytest.mark.parametrize("layer", [0, 1])
def test_a_move_in_one_layer_leaves_the_other_layer_as_it_is(layer: int) -> None:
    """Its weights, optimizer state and gradients, and the next step of both."""
    after = placed(2, *((AFTER if n == layer else BEFORE).layers[n].copies for n in (0, 1)))
    old, new, arrived = shard_of(BEFORE, 0), shard_of(BEFORE, 1), {}
    before = hashes(old) | hashes(new)
    data = _pack(old, [(layer, 1)])
    assert _unpack(data, _digest(data), into=arrived)
    for shard in (old, new):
        for grad in shard.layers[1 - layer].gradients.payloads:
            grad.fill_(7.0)
    old.switch(after, {})
    new.switch(after, arrived)
    assert hashes(old) | hashes(new) == before
    for shard in (old, new):
        assert all((grad == 7.0).all() for grad in shard.layers[1 - layer].gradients.payloads)
        step(shard)
    stayed = [shard_of(BEFORE, host) for host in range(2)]
    for shard in stayed:
        step(shard)
    assert hashes(old) | hashes(new) == hashes(stayed[0]) | hashes(stayed[1]), "the next step differs"


@pytest.mark.parametrize("used", [0, 1])
def test_a_layer_without_a_pass_in_a_step_stays_as_it_is(used: int) -> None:
    """Neither weight decay nor the moments of earlier steps move it, and its own next step is that of before."""
    shard, before = shard_of(BEFORE, 1), shard_of(BEFORE, 1)
    sources = [[2] * len(shard.layers[used].experts)]
    rows = torch.ones(sum(sources[0]), 16, dtype=torch.float64)
    shard.forward(used, 0, rows, sources, keep=True)
    shard.backward(used, 0, rows, sources)
    assert shard.used == {used}
    shard.commit(CommitDecision(skip=False, coefficient=1.0, inverse_scale=1.0, lr=0.1), layers=shard.used)
    same = {key: value == hashes(before)[key] for key, value in hashes(shard).items()}
    assert same == {key: key[0] != used for key in before.homes()}
    for one in (shard, before):
        step(one)
    assert all((hashes(shard)[key] == hashes(before)[key]) == (key[0] != used) for key in before.homes())


def test_data_that_arrives_corrupted_is_refused() -> None:
    data, into = _pack(shard_of(BEFORE, 0), [(0, 1)]), {}
    corrupted = data[:-1] + bytes([data[-1] ^ 1])
    assert not _unpack(corrupted, _digest(data), into=into) and not into


@pytest.mark.parametrize("fused", [True, False])
def test_the_step_of_an_expert_that_arrives_is_where_the_optimizer_reads_it(fused: bool) -> None:
    """From a checkpoint or another host: float32 on the parameter's device for fused kernels, else on the CPU."""
    source = shard_of(BEFORE, 0)
    state = {name: value.double() for name, value in source.state_of((0, 1)).items()}
    there = ExpertShard(
        SHAPES, BEFORE, 0, optim=OptimConfig(), dtype=torch.float64, device=torch.device("meta")
    )  # like a GPU, it cannot read what is on the CPU
    for optimizer in there.optimizers:
        for group in optimizer.param_groups:
            group["fused"] = fused
    there.load_state((0, 1), state)
    held = [state for optimizer in there.optimizers for state in optimizer.state.values()]
    assert held and all(state["step"].device.type == ("meta" if fused else "cpu") for state in held)
    assert all(state["step"].dtype == (torch.float32 if fused else torch.float64) for state in held)
    assert all(state["exp_avg"].is_meta for state in held)
    back = shard_of(BEFORE, 0)
    back.load_state((0, 1), state)  # on this device
    step(back)


def test_the_counts_reach_a_gpu_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[object, ...]] = []

    class Pinned:
        def to(self, device: torch.device, *, non_blocking: bool = False) -> str:
            copied.append((device.type, non_blocking))
            return "on the device"

    monkeypatch.setattr(torch, "tensor", lambda _values, *, pin_memory=False, **_more: Pinned() if pin_memory else None)
    assert _counts_on(torch.device("cuda"), [1, 2]) == "on the device" and copied == [("cuda", True)]


def test_experts_that_only_answer_have_neither_gradients_nor_an_optimizer() -> None:
    """The answers of experts that are trained, in the memory of their weights."""
    trained = shard_of(BEFORE, 0)
    kind = {"optim": OptimConfig(), "dtype": torch.float64, "device": torch.device("cpu")}
    answers = ExpertShard(SHAPES, BEFORE, 0, **kind, trains=False)
    for key in trained.held():
        answers.set_weights(key, trained.weights_of(key))
    rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    made = [one.forward(0, 0, rows, [[2, 3]], keep=False) for one in (trained, answers)]
    assert torch.equal(*made) and made[0].abs().sum() > 0
    assert answers.optimizers == []
    for layer in answers.layers:
        stacks = [stack for stack in (layer.homes, layer.replicas) if stack is not None]
        assert all(parameter.grad is None for stack in stacks for parameter in stack.parameters())
    answers.discard()


@pytest.mark.parametrize("host", [0, 1])
def test_the_squares_of_each_expert_are_those_of_its_own_gradients(host: int) -> None:
    """Of experts of several sizes in a layer, and of one whose w1 is frozen; replicas are not counted."""
    shapes = [SHAPES[0], LayerShape(16, (16, 16), "swiglu", frozen_E=((), ("w1",)))]
    shard = ExpertShard(
        shapes, BEFORE, host, optim=OptimConfig(), dtype=torch.float32, device=torch.device("cpu")
    )  # fmt: skip
    for layer, expert in shard.homes():
        draw = torch.Generator().manual_seed(10 * layer + expert)
        for grad in shard.layers[layer].gradients_of(expert).values():
            grad.copy_(torch.randn(grad.shape, generator=draw))
    found = shard.squares()
    assert list(found) == shard.homes() and len(found) == (3 if host == 0 else 2)
    for (layer, expert), square in found.items():
        assert square == sum_of_squares(list(shard.layers[layer].gradients_of(expert).values())).item()
