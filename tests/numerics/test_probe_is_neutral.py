"""ARCHITECTURE.md, 9: measuring precisions, or a candidate with whole steps, changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lab import MOE, Rows, class_rows, digest, make_session, optimizer_state, token_rows, train
from torch import Tensor, nn

from experts.router import TopKRouter
from raytrain.autotune.measurement import Candidate
from raytrain.autotune.startup import measure_precision
from raytrain.autotune.step_probe import StepProbe
from raytrain.data.rows.batches import Cursor
from raytrain.train.device import rng_state
from raytrain.train.session import Session
from raytrain.trainable import Trainable


class Noisy(nn.Module):
    """Dropout, a batch norm that counts, and one that its owner keeps in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 24), nn.Linear(24, 4)
        self.norm, self.frozen = nn.BatchNorm1d(24), nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.3)

    def train(self, mode: bool = True) -> Noisy:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.frozen(self.norm(torch.relu(self.inner(x))))
        return {"loss": nn.functional.cross_entropy(self.outer(self.drop(hidden)), labels)}


def noisy() -> Session:
    torch.manual_seed(3)
    data = {"train": class_rows(48), "eval_fraction": 0.0}
    return make_session({"module": Noisy()}, data, loop={"max_steps": 8, "micro_batch_size": 8}, seed=4)


def moe() -> Session:
    experts = {"num_experts": 4, "top_k": 2, "hosts": 0, "trace_every": 1}
    data = {"train": token_rows(48), "eval_fraction": 0.0}
    model = {**MOE, "dropout": 0.1}
    return make_session(model, data, loop={"max_steps": 8, "micro_batch_size": 8}, experts=experts, seed=4)


class Signs(torch.optim.Optimizer):
    """A user's optimizer: cannot skip on the device, keeps a tensor and a number for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            kept = self.state[parameter]
            kept["average"] = 0.9 * kept.get("average", torch.zeros_like(parameter)) + 0.1 * parameter.grad
            kept["steps"] = kept.get("steps", 0) + 1
            parameter -= self.param_groups[0]["lr"] * torch.sign(kept["average"]) / kept["steps"]


def own_optimizer() -> Session:
    torch.manual_seed(3)
    module = Noisy()
    own = Trainable.from_module(module)
    own.optimizers = lambda module, optim: [Signs(module.parameters())]
    data = {"train": class_rows(48), "eval_fraction": 0.25}
    loop = {"max_steps": 8, "micro_batch_size": 8, "global_batch_size": 16}
    return make_session({"module": own}, data, loop=loop, seed=4)


def momentum() -> Session:
    torch.manual_seed(3)
    data = {"train": class_rows(48), "eval_fraction": 0.25}
    loop = {"max_steps": 8, "micro_batch_size": 8, "global_batch_size": 16}
    optim = {"name": "sgd", "momentum": 0.9, "lr": 0.01}
    return make_session({"module": Noisy()}, data, loop=loop, optim=optim, seed=4)


def traced_moe() -> Session:
    experts = {"num_experts": 4, "top_k": 2, "hosts": 0, "trace_every": 1, "capacity_factor": 1.25}
    data = {"train": token_rows(48), "eval_fraction": 0.25}
    return make_session(
        {**MOE, "dropout": 0.1}, data, loop={"max_steps": 8, "micro_batch_size": 8}, experts=experts, seed=4
    )


def state_of(session: Session) -> dict[str, Any]:
    """Hashes of everything a run consists of."""
    module = session.trainable.module
    order = [session.loader.global_batch(Cursor(epoch, 0)).indices.tolist() for epoch in (0, 1)]
    return {
        "parameters": digest(dict(module.named_parameters())),
        "buffers": digest(dict(module.named_buffers())),
        "optimizer": digest(optimizer_state(session)),
        "generators": digest(rng_state(session.device)),
        "data": digest(order, session.state.to_json()),
        "modes": [part.training for part in module.modules()],
        "traces": [part.seen is None for part in module.modules() if isinstance(part, TopKRouter)],
        "scale": digest(session.step.scale.value),
        "parts": digest(session.parts()),
        "groups": repr([{**group, "params": 0} for o in session.optimizers for group in o.param_groups]),
        "counts": digest(session.trainable.counts()) if session.trainable.counts else "",
        "seen": [part.seen for part in module.modules() if isinstance(part, TopKRouter)],
        "micro": session.loader.batches.micro_batch,
        "policy": (session.step.policy.name, torch.get_float32_matmul_precision(), session.step.inflight),
        "moments": [len(optimizer.state) for optimizer in session.optimizers],
    }


@pytest.mark.covers("PREC-05")
@pytest.mark.parametrize("build", [noisy, moe])
def test_the_precision_probe_changes_nothing(build: Any) -> None:
    session = build()
    before = state_of(session)
    chosen, trials = measure_precision(StepProbe(session), ["fp32", "bf16", "fp16"])
    assert state_of(session) == before
    # and what it measured is there to be recorded
    assert [trial["candidate"]["precision"] for trial in trials] == ["fp32", "bf16", "fp16"]
    assert all(0 < min(trial["pass_s"]) < 60 and trial["loss"] > 0 and trial["grad_norm"] > 0 for trial in trials)
    assert chosen.value in ("fp32", "bf16", "fp16") and "bf16" in chosen.reason and "times as fast" in chosen.reason


@pytest.mark.parametrize("build", [noisy, moe])
def test_a_run_after_the_probe_is_the_run_without_it(build: Any) -> None:
    first = train(plain := build())[0]
    probed = build()
    measure_precision(StepProbe(probed), ["fp32", "bf16"])
    second = train(probed)[0]
    assert first.losses == second.losses and len(first.losses) == 8
    assert digest(plain.trainable.module.state_dict()) == digest(probed.trainable.module.state_dict())


def test_a_probe_in_the_middle_of_a_run_is_neutral_too() -> None:
    """The optimizer has moments by then, the batch norm has counted."""
    reference = train(noisy())[0].losses
    stopped = noisy()
    loop = stopped.loop(reporter=(rows := Rows()), should_stop=lambda: stopped.state.step == 3)
    assert loop.run(stopped.state).kind == "interrupted"
    before = state_of(stopped)
    measure_precision(StepProbe(stopped), ["fp32", "bf16"])
    assert state_of(stopped) == before
    assert rows.losses + train(stopped)[0].losses == reference


BUILT = [noisy, moe, traced_moe, momentum, own_optimizer]
CANDIDATES = [Candidate("fp32", 4), Candidate("bf16", 8), Candidate("fp16", 16)]


@pytest.mark.covers("TUNE-04")
@pytest.mark.parametrize("build", BUILT)
def test_training_steps_of_a_candidate_change_nothing(build: Any) -> None:
    session = build()
    before = state_of(session)
    for candidate in CANDIDATES:
        found = StepProbe(session).measure(candidate, budget=None, passes=2, with_memory=True)
        assert state_of(session) == before, candidate
        assert found.outcome == "ok", found
        assert found.loss > 0 and found.grad_norm > 0
        assert len(found.pass_s) == len(found.update_s) == 2
        assert found.peak_bytes is not None and found.floor_bytes is not None
        assert found.peak_bytes >= found.floor_bytes


@pytest.mark.parametrize("build", BUILT)
def test_a_run_interrupted_by_measurements_is_the_run_without_them(build: Any) -> None:
    """Before it and in its middle, where the optimizer has state and the batch norm has counted."""
    plain = build()
    reference = train(plain)[0].losses
    probed = build()
    StepProbe(probed).measure(CANDIDATES[0], budget=None, passes=1, with_memory=True)
    loop = probed.loop(reporter=(rows := Rows()), should_stop=lambda: probed.state.step == 3)
    assert loop.run(probed.state).kind == "interrupted"
    before = state_of(probed)
    for candidate in CANDIDATES:
        StepProbe(probed).measure(candidate, budget=None, passes=1, with_memory=True)
    assert state_of(probed) == before
    assert rows.losses + train(probed)[0].losses == reference and len(reference) == 8
    assert digest(plain.trainable.module.state_dict()) == digest(probed.trainable.module.state_dict())


def test_a_failing_candidate_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = momentum()
    before = state_of(session)
    forward, calls = session.trainable.loss, []

    def fails(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("from a test")
        return forward(*arguments, **named)

    monkeypatch.setattr(session.trainable, "loss", fails)
    found = StepProbe(session).measure(Candidate("fp32", 8), budget=None, passes=3, with_memory=True)
    assert found.outcome == "out_of_memory" and found.reason == "from a test"
    assert found.peak_bytes is None and found.pass_s == ()
    assert state_of(session) == before
    monkeypatch.setattr(session.trainable, "loss", forward)
    assert StepProbe(session).measure(Candidate("fp32", 8), budget=None, passes=3, with_memory=True).outcome == "ok"
    too_much = StepProbe(session).measure(Candidate("fp32", 8), budget=1000, passes=3, with_memory=True)
    assert too_much.outcome == "out_of_memory" and "the budget is 1000 B" in too_much.reason
    assert too_much.peak_bytes is not None and too_much.peak_bytes > 1000
