"""DESIGN 4.9: measuring precisions changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lab import MOE, Rows, class_rows, digest, make_session, optimizer_state, token_rows, train
from torch import Tensor, nn

from experts.router import TopKRouter
from raytrain.data.batches import Cursor
from raytrain.device import rng_state
from raytrain.session import Session


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


def state_of(session: Session) -> dict[str, Any]:
    """Hashes of everything a run consists of."""
    module = session.trainable.module
    order = [session.feed.window(Cursor(epoch, 0)).handles.tolist() for epoch in (0, 1)]
    return {
        "parameters": digest(dict(module.named_parameters())),
        "buffers": digest(dict(module.named_buffers())),
        "optimizer": digest(optimizer_state(session)),
        "generators": digest(rng_state(session.device)),
        "data": digest(order, session.state.to_json()),
        "modes": [part.training for part in module.modules()],
        "traces": [part.seen is None for part in module.modules() if isinstance(part, TopKRouter)],
        "scale": digest(session.step.scale.value),
        "moments": [len(optimizer.state) for optimizer in session.optimizers],
    }


@pytest.mark.covers("PREC-05")
@pytest.mark.parametrize("build", [noisy, moe])
def test_the_precision_probe_leaves_everything_as_it_was(build: Any) -> None:
    session = build()
    before = state_of(session)
    chosen, trials = session.measure_precision(["fp32", "bf16", "fp16"])
    assert state_of(session) == before
    # and what it measured is there to be recorded
    assert [trial["precision"] for trial in trials] == ["fp32", "bf16", "fp16"]
    assert all(0 < trial["seconds"] < 60 and trial["loss"] > 0 and trial["grad_norm"] > 0 for trial in trials)
    assert chosen.value in ("fp32", "bf16", "fp16") and "bf16" in chosen.reason and "times as fast" in chosen.reason


@pytest.mark.parametrize("build", [noisy, moe])
def test_a_run_after_the_probe_is_the_run_without_it(build: Any) -> None:
    first = train(plain := build())[0]
    probed = build()
    probed.measure_precision(["fp32", "bf16"])
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
    stopped.measure_precision(["fp32", "bf16"])
    assert state_of(stopped) == before
    assert rows.losses + train(stopped)[0].losses == reference
