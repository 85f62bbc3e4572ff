"""Evaluation: the right numbers, and no trace on the training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from lab import GPT, MLP, MOE, Rows, class_rows, digest, make_session, optimizer_state, token_rows, train
from torch import Tensor, nn

from cluster.telemetry.processes import WORK
from raytrain.data.rows.batches import Cursor
from raytrain.train.device import rng_state
from raytrain.train.session import Session

Weights = dict[str, np.ndarray]


def weights_now(session: Session) -> Weights:
    return {name: value.double().numpy().copy() for name, value in session.trainable.module.state_dict().items()}


def offline(weights: Weights, columns: dict[str, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Loss and hit of each row of an MLP, recomputed in float64 from its weights alone."""
    gelu = np.vectorize(lambda value: 0.5 * value * (1 + math.erf(value / 2**0.5)))
    values = columns["x"].double().numpy()
    for layer in range(3):
        values = values @ weights[f"layers.{layer}.weight"].T + weights[f"layers.{layer}.bias"]
        values = gelu(values) if layer < 2 else values
    labels = columns["labels"].numpy()
    losses = np.log(np.exp(values).sum(1)) - values[np.arange(len(values)), labels]
    return losses, values.argmax(1) == labels


@pytest.mark.covers("LOOP-10")
def test_losses_and_accuracies_are_those_of_an_offline_recomputation() -> None:
    rows, held_out = class_rows(75), class_rows(41, seed=4)
    session = make_session(
        MLP,
        {"train": rows, "eval": held_out},
        loop={"epochs": 2, "max_steps": None, "eval_every": 5, "micro_batch_size": 4, "global_batch_size": 16},
    )
    used: list[tuple[Weights, np.ndarray]] = []  # of each step: the weights it began with, its rows
    window = session.loader.global_batch

    def watched(cursor: Cursor) -> Any:
        found = window(cursor)
        used.append((weights_now(session), found.indices))
        return found

    session.loader.global_batch = watched  # type: ignore[method-assign]
    made, _ = train(session)
    assert len(made.losses) == len(used) == 10 and [len(indices) for _, indices in used][4] == 11
    for loss, (weights, indices) in zip(made.losses, used, strict=True):
        wanted, _ = offline(weights, {name: column[torch.from_numpy(indices)] for name, column in rows.items()})
        assert loss == pytest.approx(wanted.mean(), rel=1e-5)
    after = {5: used[5][0], 10: weights_now(session)}
    evals = [row for row in made.rows if row["kind"] == "eval"]
    assert [row["step"] for row in evals] == [5, 10]
    for row in evals:
        losses, hits = offline(after[row["step"]], held_out)
        assert row["loss"] == pytest.approx(losses.mean(), rel=1e-5) and row["accuracy"] == hits.mean()


class Counting(nn.Module):
    """Counts its forwards in a buffer, has a batch norm and a part that its owner keeps frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.frozen = nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def train(self, mode: bool = True) -> Counting:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.forwards += int(self.training)
        return {"loss": nn.functional.cross_entropy(self.frozen(self.norm(self.linear(x))), labels)}


def session_of(name: str) -> Session:
    experts = {"num_experts": 4, "top_k": 2, "hosts": 0}
    tokens = {"train": token_rows(48), "eval": token_rows(20, seed=1)}
    if name == "counting":
        torch.manual_seed(0)
        data = {"train": class_rows(48), "eval": class_rows(20, seed=1)}
        return make_session({"module": Counting()}, data, loop={"max_steps": 6})
    if name == "moe_gpt":
        return make_session({**MOE, "dropout": 0.2}, tokens, loop={"max_steps": 6}, experts=experts)
    return make_session({**GPT, "dropout": 0.2}, tokens, loop={"max_steps": 6})


@pytest.mark.covers("LOOP-11")
@pytest.mark.parametrize("name", ["counting", "gpt", "moe_gpt"])
def test_evaluating_changes_no_counter_no_buffer_and_no_later_step(name: str) -> None:
    reference = train(session_of(name))[0].losses
    session = session_of(name)
    module = session.trainable.module

    def state() -> dict[str, Any]:
        experts = sum(part.num_experts for part in module.modules() if hasattr(part, "num_experts"))
        return {
            "tensors": digest(dict(module.named_parameters()), dict(module.named_buffers()), optimizer_state(session)),
            "loop": session.state.to_json(),
            "generators": digest(rng_state(session.device)),
            "modes": [part.training for part in module.modules()],
            "experts": experts,
        }

    modes = state()["modes"]
    stopped = session.loop(reporter=(rows := Rows()), should_stop=lambda: session.state.step == 3)
    stopped.run(session.state)
    before = state()
    assert before["modes"] == modes, "an evaluation inside the loop left a part in another mode"
    assert session.evaluate(3) == session.evaluate(3)
    assert state() == before
    assert rows.losses + train(session)[0].losses == reference


def test_each_batch_of_an_evaluation_and_each_micro_batch_of_a_step_counts_as_work() -> None:
    """The driver distinguishes a long one from a stuck one by it."""
    loop = {"max_steps": 2, "micro_batch_size": 4, "global_batch_size": 16}
    session = make_session(MLP, {"train": class_rows(64), "eval": class_rows(40, seed=4)}, loop=loop)
    before = WORK.done
    session.evaluate(0)
    assert WORK.done - before == 3
    train(session)
    assert WORK.done - before == 3 + 2 * 4 + 3, "two steps, and the evaluation at the end"


def test_a_failing_eval_batch_raises_and_is_not_skipped() -> None:
    session = session_of("gpt")
    inner, calls = session.trainable.loss, []

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Any:
        calls.append(len(batch["labels"]))
        if len(calls) == 2:
            raise ValueError("the second batch")
        return inner(module, batch)

    session.trainable.loss = loss
    session.loader.batches.micro_batch = 3  # 20 rows in batches of 12
    with pytest.raises(ValueError, match="the second batch"):
        session.evaluate(0)
    assert calls == [12, 8] and session.trainable.module.training


def test_rows_are_weighted_by_their_labels_and_a_batch_without_labels_by_zero() -> None:
    held_out = token_rows(24, seed=1, ragged=True, empty=range(12))
    session = make_session(GPT, {"train": token_rows(48), "eval": held_out}, loop={"global_batch_size": 3})
    module = session.trainable.module.eval()
    logits = module(held_out["input_ids"])["logits"]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), held_out["labels"].flatten(), ignore_index=-100)
    valid = held_out["labels"] != -100
    hits = ((logits.argmax(-1) == held_out["labels"]) & valid).sum() / valid.sum()
    module.train()
    made = session.evaluate(0)
    assert made["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert made["accuracy"] == pytest.approx(float(hits), rel=1e-6)


class Summed(nn.Module):
    """Divides by the global count, as models of the transformers convention do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: int) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(self.linear(x), labels, reduction="sum")
        return {"loss": loss / num_items_in_batch}


def test_a_model_that_divides_by_the_global_count_has_the_mean_of_its_rows_as_eval_loss() -> None:
    held_out = class_rows(20, seed=1)
    session = make_session({"module": Summed()}, {"train": class_rows(48), "eval": held_out})
    session.loader.batches.micro_batch = 3  # 20 rows in batches of 12
    with torch.no_grad():
        logits = session.trainable.module.linear(held_out["x"])
    wanted = float(nn.functional.cross_entropy(logits, held_out["labels"]))
    assert session.evaluate(0)["loss"] == pytest.approx(wanted, rel=1e-6)


def test_an_eval_split_without_a_label_has_no_loss() -> None:
    held_out = token_rows(8, seed=1, empty=range(8))
    session = make_session(GPT, {"train": token_rows(48), "eval": held_out})
    assert math.isnan(session.evaluate(0)["loss"])
