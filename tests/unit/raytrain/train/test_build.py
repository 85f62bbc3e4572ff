"""Parameter groups, optimizers and the learning rate."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from lab import GPT, MLP, MOE, class_rows, make_session, token_rows, train
from torch import nn

import raytrain.train.optim
from jobs.job.spec import load_spec
from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError
from raytrain.train.optim import (
    Muon,
    Schedule,
    build_optimizers,
    hidden_matrices,
    parameter_groups,
    takes_skip_on_device,
)


def schedule(kind: str = "cosine", *, warmup: int = 4, steps: int = 24, final: float = 0.1) -> Schedule:
    return Schedule(OptimConfig(schedule=kind, final_lr_fraction=final), lr=0.02, warmup_steps=warmup, max_steps=steps)


@pytest.mark.covers("LOOP-06")
def test_the_learning_rate_is_its_closed_form_at_the_start_after_warm_up_and_at_the_end() -> None:
    """Steps count from 1: step 1 moves already, step w + 1 is the first at the peak, the last is at the floor."""
    session = make_session(
        MLP,
        {"train": class_rows(64), "eval_fraction": 0.0},
        loop={"max_steps": 24},
        optim={"lr": 0.02, "warmup_steps": 4, "final_lr_fraction": 0.1},
    )
    used: list[float] = []
    session.trainable.between_steps = lambda step: used.append(session.optimizers[0].param_groups[0]["lr"])
    rows, _ = train(session)
    assert used == rows.of("train", "lr")  # what is logged is what was used
    assert used[:5] == pytest.approx([0.02 * step / 5 for step in (1, 2, 3, 4, 5)], rel=1e-12)
    for step in range(5, 25):
        cosine = 0.002 + 0.018 * (1 + math.cos(math.pi * (step - 5) / 19)) / 2
        assert used[step - 1] == pytest.approx(cosine, rel=1e-12), step
    assert used[-1] == pytest.approx(0.002, rel=1e-12) and max(used) == used[4]


@pytest.mark.parametrize(
    ("kind", "at_peak", "half_way", "at_end"), [("linear", 1.0, 0.55, 0.1), ("constant", 1.0, 1.0, 1.0)]
)
def test_the_other_schedules(kind: str, at_peak: float, half_way: float, at_end: float) -> None:
    made = schedule(kind, warmup=4, steps=25)
    assert [made.factor(step) for step in (5, 15, 25)] == pytest.approx([at_peak, half_way, at_end])
    assert made.factor(2) == pytest.approx(0.4)


@pytest.mark.parametrize("warmup", [0, 1, 23, 24])
def test_any_length_of_warm_up_stays_in_range(warmup: int) -> None:
    factors = [schedule(warmup=warmup).factor(step) for step in range(1, 30)]
    assert all(0 < factor <= 1 for factor in factors)
    assert factors[0] == (1.0 if warmup == 0 else 1 / (warmup + 1))
    assert schedule(warmup=0, steps=1).factor(1) == 1.0


@pytest.mark.covers("CLI-07")
def test_a_learning_rate_from_the_command_line_reaches_the_groups_and_keeps_their_ratio() -> None:
    spec = load_spec(None, ["optim.lr=0.5", "optim.warmup_steps=0"]).spec
    assert (spec.optim.lr, spec.optim.weight_decay) == (0.5, OptimConfig().weight_decay)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": module[0].parameters()}, {"params": module[1].parameters(), "lr": spec.optim.lr * 0.1}]
    optimizer = torch.optim.SGD(groups, lr=spec.optim.lr)
    made = Schedule(spec.optim, lr=spec.optim.lr, warmup_steps=0, max_steps=11)
    for step in (1, 6, 11):
        assert made.apply([optimizer], step) == pytest.approx(0.5 * made.factor(step))
        one, tenth = (group["lr"] for group in optimizer.param_groups)
        assert one == pytest.approx(0.5 * made.factor(step)) and tenth == pytest.approx(0.1 * one)
    assert made.factor(6) < 0.6


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head, self.norm = nn.Embedding(7, 4), nn.Linear(4, 7), nn.LayerNorm(4)
        self.head.weight = self.tokens.weight
        self.norm.weight.requires_grad_(False)


def test_matrices_decay_vectors_do_not_tied_weights_stand_once_and_frozen_ones_nowhere() -> None:
    module = Tied()
    decay, plain = parameter_groups(module.named_parameters(remove_duplicate=False), weight_decay=0.3)
    assert decay["weight_decay"] == 0.3 and [id(p) for p in decay["params"]] == [id(module.tokens.weight)]
    assert plain["weight_decay"] == 0.0
    assert {id(p) for p in plain["params"]} == {id(module.head.bias), id(module.norm.bias)}
    assert len(parameter_groups(nn.Linear(2, 2, bias=False).named_parameters(), weight_decay=0.1)) == 1


class Stacked(nn.Module):
    stacked_vectors = ("rows", "absent")

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.stack, self.absent = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4)), None


def test_a_stack_of_vectors_does_not_decay_like_a_matrix() -> None:
    module = nn.ModuleList([Stacked()])
    (optimizer,) = build_optimizers(module, OptimConfig(weight_decay=0.3), lr=0.1)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(module[0].rows): 0.0, id(module[0].stack): 0.3}


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_the_optimizers_have_the_keys_of_their_section_and_skip_on_the_device(name: str, kind: type) -> None:
    config = OptimConfig(name=name, betas=(0.8, 0.95), eps=1e-6, momentum=0.7, weight_decay=0.2)
    (optimizer,) = build_optimizers(Tied(), config, lr=0.04)
    assert isinstance(optimizer, kind) and takes_skip_on_device(optimizer)
    group = optimizer.param_groups[0]
    assert group["fused"] is True and group["lr"] == 0.04 and group["weight_decay"] == 0.2
    wanted = {"betas": (0.8, 0.95), "eps": 1e-6} if name == "adamw" else {"momentum": 0.7}
    assert {key: group[key] for key in wanted} == wanted
    assert not takes_skip_on_device(torch.optim.AdamW([nn.Parameter(torch.zeros(2))], fused=False))


@pytest.mark.parametrize("model", [GPT, MOE], ids=["gpt", "moe_gpt"])
def test_muon_gets_the_matrices_of_the_blocks_and_adamw_the_rest(model: dict[str, Any]) -> None:
    experts = {"experts": {"num_experts": 4, "hosts": 0, "bias": True}} if model is MOE else {}
    data = {"train": token_rows(32), "eval_fraction": 0.0}
    session = make_session(model, data, optim={"name": "muon", "momentum": 0.8, "lr": 0.02}, **experts)
    muon, adamw = session.optimizers
    names = {id(parameter): name for name, parameter in session.trainable.module.named_parameters()}
    own = [{names[id(p)] for group in o.param_groups for p in group["params"]} for o in (muon, adamw)]
    assert type(muon) is Muon and isinstance(adamw, torch.optim.AdamW) and session.step.skips_on_device
    assert own[0] | own[1] == set(names.values()) and not own[0] & own[1]
    kinds = {name.rpartition("blocks.")[2].partition(".")[2] for name in own[0]}
    dense = {"feed_forward.up.weight", "feed_forward.out.weight"}
    stacks = {"feed_forward.router.weight", "feed_forward.experts.w1", "feed_forward.experts.w2"}
    assert kinds == {"attention.qkv.weight", "attention.out.weight"} | (stacks if model is MOE else dense)
    assert {"tokens.weight", "positions", "norm.weight"} <= own[1]
    assert muon.param_groups[0]["momentum"] == 0.8 and muon.param_groups[0]["lr"] == 0.02
    rows, _ = train(session)
    assert rows.losses[-1] < rows.losses[0]


class TableInside(nn.Module):
    """A block with a table of its own, and a matrix that the model's head uses too."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.table, self.linear, self.shared = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.shared.weight = shared
        self.kernel = nn.Parameter(torch.ones(2, 3, 4))


def test_muon_excludes_embeddings_shared_and_frozen_matrices_and_kernels() -> None:
    head = nn.Linear(4, 4)
    blocks = nn.ModuleList([TableInside(head.weight), TableInside(head.weight)])
    blocks[1].linear.weight.requires_grad_(False)
    module = nn.ModuleDict({"blocks": blocks, "head": head})
    assert hidden_matrices(module, list(blocks)) == {id(blocks[0].linear.weight)}
    blocks[0].linear.weight.requires_grad_(False)
    with pytest.raises(InputError, match="without a trainable matrix inside repeated blocks") as caught:
        build_optimizers(module, OptimConfig(name="muon"), lr=0.1, blocks=list(blocks))
    assert caught.value.key == "optim.name"


STEPS_WITHOUT = """
import sys, torch
from lab import MOE, make_session, token_rows, train
for name in ("adamw", "sgd", "muon"):
    experts = {"num_experts": 4, "hosts": 0}
    session = make_session(MOE, {"train": token_rows(32)}, optim={"name": name}, experts=experts, loop={"max_steps": 2})
    train(session)
    for optimizer in session.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


def test_no_session_imports_torchs_compiler() -> None:
    where = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STEPS_WITHOUT]
    said = subprocess.run(command, env={**os.environ, **where}, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_ours_step_as_torchs_do_bit_for_bit_hooks_and_state_included(kind: str) -> None:
    draw = torch.Generator().manual_seed(2)
    first = [torch.randn(shape, generator=draw) for shape in ((5, 4), (4,))]
    ends, hooks = [], []
    for home in (torch.optim, raytrain.train.optim):
        parameters = [nn.Parameter(value.clone()) for value in first]
        optimizer = getattr(home, kind)(parameters, lr=0.1, weight_decay=0.2, fused=True)
        optimizer.register_step_pre_hook(lambda *_: hooks.append(1))
        for index in range(4):
            for parameter in parameters:
                parameter.grad = (index + 1) * parameter.detach().sin()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
        assert all(parameter.requires_grad and parameter.grad is None for parameter in parameters)
        ends.append([parameter.detach() for parameter in parameters])
    assert all(torch.equal(one, two) for one, two in zip(*ends, strict=True)) and len(hooks) == 8


def test_momentum_after_a_skipped_first_step_begins_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory was before: here each new tensor that torch leaves unset holds NaN."""
    unset = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like, **kw: unset(like, **kw).fill_(math.nan))
    ends = []
    for skipped in (True, False):
        parameter, late = nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.ones(1))
        optimizer = raytrain.train.optim.SGD([parameter, late], lr=0.1, momentum=0.9, fused=True)
        for step, found in enumerate([1.0] * skipped + [0.0] * 3):
            parameter.grad = torch.full((2,), math.inf) if found else parameter.detach().cos()
            late.grad = torch.ones(1) if step == skipped + 1 else None  # of which nothing was used before
            optimizer.found_inf = torch.tensor(found)
            optimizer.step()
        ends.append(torch.cat([parameter.detach(), late.detach()]))
    assert torch.equal(*ends) and ends[0].isfinite().all() and ends[0][2] == pytest.approx(0.9)


def test_fsdp_supports_every_optimizer_and_the_plan_states_how() -> None:
    data = {"train": token_rows(32), "eval_fraction": 0.0}
    for name, way in (("sgd", "plain"), ("adamw", "fused"), ("muon", "fused")):
        section = {"name": name, "lr": 0.1 if name == "sgd" else 0.01}
        made = make_session(GPT, data, scale={"strategy": "fsdp"}, optim=section, loop={"max_steps": 6})
        assert made.job.planned("optimizer_impl") == way
        assert made.optimizers[-1].param_groups[0]["fused"] is (way == "fused")
        rows, _ = train(made)
        assert rows.losses[-1] < rows.losses[0], name
