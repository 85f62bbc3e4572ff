"""The norms behind the noise scale are those of the real gradients, and measuring them changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lab import GPT, MLP, class_rows, make_session, token_rows, train
from test_gate import everything
from test_probe_is_neutral import moe, noisy

from raytrain.autotune.probe.gradient_noise import measure_norms
from raytrain.autotune.search.noise_scale import noise_scale
from raytrain.train.session import Session


@pytest.mark.parametrize("build", [noisy, moe])
def test_measuring_changes_nothing(build: Any) -> None:
    session = build()
    before = everything(session)
    pairs = measure_norms(session, micro_batch_size=4, micro_batches=3, draws=2)
    assert everything(session) == before
    assert [(pair.small_rows, pair.big_rows) for pair in pairs] == [(4, 12), (4, 12)]
    assert train(session)[0].losses == train(build())[0].losses


def squares_of(session: Session, rows: Any) -> float:
    micro = session.loader.one(rows)
    loss = session.trainable.loss(session.trainable.module, micro.batch).loss
    gradients = torch.autograd.grad(loss, list(session.trainable.module.parameters()))
    return float(sum(gradient.square().sum() for gradient in gradients))


def test_a_token_budget_bounds_the_computation_and_changes_no_norm() -> None:
    found, most = [], []
    for budget in (None, 24):
        data = {"train": token_rows(64), "eval_fraction": 0.0, "tokens_per_batch": budget}
        session = make_session(GPT, data, precision="fp64")
        one, sizes = session.loader.one, []
        session.loader.one = lambda rows: sizes.append(len(rows)) or one(rows)  # noqa: B023
        pairs = measure_norms(session, micro_batch_size=4, micro_batches=3, draws=2)
        found.append([value for pair in pairs for value in (pair.small_squares, pair.big_squares)])
        most.append(max(sizes))
    assert found[0] == pytest.approx(found[1], rel=1e-12) and most == [4, 2]


def test_they_are_the_norms_of_the_mean_gradients() -> None:
    data = {"train": class_rows(64), "eval_fraction": 0.0}
    session = make_session(MLP, data, precision="fp64")
    pairs = measure_norms(session, micro_batch_size=4, micro_batches=4, draws=2)
    rows = session.loader.batches.rows_from(session.state.cursor, 32)
    for pair, part in zip(pairs, (rows[:16], rows[16:]), strict=True):
        assert pair.small_squares == pytest.approx(squares_of(session, part[:4]), rel=1e-12)
        assert pair.big_squares == pytest.approx(squares_of(session, part), rel=1e-12)
    assert noise_scale(pairs).rows > 0


def test_one_micro_batch_gives_no_noise_scale() -> None:
    with pytest.raises(ValueError, match="two micro-batches"):
        measure_norms(noisy(), micro_batch_size=4, micro_batches=1)
