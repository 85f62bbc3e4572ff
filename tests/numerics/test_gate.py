"""The numeric gate trains real steps and changes nothing (ARCHITECTURE.md, 9)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lab import GPT, MLP, Rows, class_rows, digest, make_session, token_rows, train
from test_probe_is_neutral import moe, noisy, state_of
from torch import nn

from raytrain.autotune.comparisons import run_gate
from raytrain.autotune.measurement import Candidate
from raytrain.autotune.precision import gate_refusal
from raytrain.train.session import Session


def everything(session: Session) -> dict[str, Any]:
    own = session.trainable.state_parts() if session.trainable.state_parts else {}
    return {
        **state_of(session),
        "own": digest({name: part.state_dict() for name, part in own.items()}),
        "policy": session.step.policy.name,
        "matmul": torch.get_float32_matmul_precision(),
        "groups": [group["lr"] for optimizer in session.optimizers for group in optimizer.param_groups],
    }


@pytest.mark.parametrize("build", [noisy, moe])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_gate_changes_nothing(build: Any, precision: str) -> None:
    session = build()
    before = everything(session)
    report = run_gate(session, Candidate(precision, 8), reference="fp32", steps=5)
    assert everything(session) == before
    assert len(report.losses) == len(report.reference_norms) == 5 and report.error is None
    assert all(loss > 0 for loss in report.losses) and all(norm > 0 for norm in report.reference_norms)


def test_a_token_budget_bounds_the_gate_and_changes_no_step() -> None:
    found, most = [], []
    for budget in (None, 24):
        data = {"train": token_rows(64), "eval_fraction": 0.0, "tokens_per_batch": budget}
        session = make_session(GPT, data)
        one, sizes = session.loader.one, []
        session.loader.one = lambda rows: sizes.append(len(rows)) or one(rows)  # noqa: B023
        found.append(run_gate(session, Candidate("bf16", 8), reference="fp32", steps=3).reference_losses)
        most.append(max(sizes))
    assert found[0] == pytest.approx(found[1], rel=1e-5) and most == [8, 2]


def test_in_the_middle_of_a_run_too() -> None:
    reference = train(noisy())[0].losses
    stopped = noisy()
    loop = stopped.loop(reporter=(rows := Rows()), should_stop=lambda: stopped.state.step == 3)
    loop.run(stopped.state)
    before = everything(stopped)
    run_gate(stopped, Candidate("bf16", 8), reference="fp32", steps=4)
    assert everything(stopped) == before
    assert rows.losses + train(stopped)[0].losses == reference


def test_its_steps_are_those_of_the_run() -> None:
    """The reference's losses equal a run's with the same rows in each step, bit for bit."""
    data = {"train": class_rows(64), "eval_fraction": 0.0}
    session = make_session(MLP, data, loop={"global_batch_size": 8, "micro_batch_size": 8, "max_steps": 6})
    report = run_gate(session, Candidate("fp32", 8), reference="fp32", steps=6)
    rows = train(session)[0]
    assert list(report.reference_losses) == list(report.losses) == rows.losses
    assert list(report.norms) == rows.of("train", "grad_norm")
    assert gate_refusal(report) == ""


class Brittle(nn.Module):
    """Trains well, but what its weights add to is so large that bfloat16 rounds the sum to a few values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.inner(x) + 100.0
        scores = scores.to(torch.bfloat16).float() if scores.dtype is torch.bfloat16 else scores
        return {"loss": nn.functional.cross_entropy(scores, labels)}


def test_a_precision_that_trains_otherwise_is_refused() -> None:
    torch.manual_seed(3)
    data = {"train": class_rows(64), "eval_fraction": 0.0}
    loop = {"max_steps": 20, "micro_batch_size": 8}
    session = make_session({"module": Brittle()}, data, loop=loop, optim={"lr": 0.05})
    assert "loss after 20 steps" in gate_refusal(run_gate(session, Candidate("bf16", 8), reference="fp32", steps=20))


def test_a_missing_kernel_is_a_result_without_side_effects() -> None:
    session = noisy()
    before, inner = everything(session), session.trainable.loss

    def loss(module: nn.Module, batch: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("\"op\" not implemented for 'Half'\nmore")
        return inner(module, batch)

    session.trainable.loss = loss
    report = run_gate(session, Candidate("fp16", 8), reference="fp32", steps=2)
    assert gate_refusal(report) == "\"op\" not implemented for 'Half'" and not report.out_of_memory
    assert everything(session) == before


def test_a_gate_without_memory_is_a_result_too() -> None:
    session = noisy()
    before, inner = everything(session), session.trainable.loss

    def loss(module: nn.Module, batch: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("no room for it")
        return inner(module, batch)

    session.trainable.loss = loss
    report = run_gate(session, Candidate("bf16", 8), reference="fp32", steps=3)
    assert report.error is not None and "no room for it" in report.error and "rank 0" in report.error
    assert report.out_of_memory
    assert everything(session) == before
