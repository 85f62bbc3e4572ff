"""ARCHITECTURE.md, 6: what is not finite on one worker skips the step on all of them, once."""

from __future__ import annotations

import math
from typing import Any

import lives
import numpy as np
import pytest
import torch
from gang import run_gang
from lab import GPT, MLP, class_rows, make_session, token_rows, train

pytestmark = pytest.mark.daily

CASES = [(precision, fault) for precision in ("fp32", "fp16") for fault in lives.FAULTS] + [("bf16", lives.FAULTS[0])]


@pytest.fixture(scope="module")
def made() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(precision, fault) -> what each of two ranks has seen; the fault is rank 1's, at step 3."""
    ranks = run_gang(lives.nonfinite, CASES, world_size=2)
    return {case: [rank[index] for rank in ranks] for index, case in enumerate(CASES)}


@pytest.mark.parametrize(("precision", "fault"), CASES)
def test_all_workers_skip_that_step_and_continue(
    made: dict[tuple[str, str], list[dict[str, Any]]], precision: str, fault: str
) -> None:
    one, two = made[precision, fault]
    for rank in (one, two):
        states = rank["states"]  # before step 1, after step 1, 2, ...
        assert states[3] == states[2], "weights, moments or step counts moved in the skipped step"
        assert len(set(states)) == len(states) - 1, "another step than the third was skipped"
        assert rank["skipped"] == [0, 0, 1, 1, 1, 1] and rank["outcome"] == "done"
        named = [row["what"] for row in rank["events"] if row["kind"] == "nonfinite"]
        what = {"loss is nan": "the loss was nan", "auxiliary loss is inf": "the auxiliary loss was inf"}
        if precision == "fp32":  # fp16 skips a step now and then, which is no event
            assert len(named) == 1 and named[0] == what.get(fault, named[0])
        assert not math.isfinite(rank["norms"][2]) and np.isfinite(np.delete(rank["norms"], 2)).all()
    assert one["states"] == two["states"], "the ranks differ"


@pytest.mark.covers("PREC-03", "FUT-03")
def test_the_scale_of_fp16_halves_exactly_once_and_is_out_of_the_norm_before_the_clip(
    made: dict[tuple[str, str], list[dict[str, Any]]],
) -> None:
    for fault in lives.FAULTS:
        for rank in made["fp16", fault]:
            assert rank["scales"] == [2.0**16] * 2 + [2.0**15] * 4 and rank["skipped"][-1] == 1
            # unscaled before it was taken: the norm is that of float32, and 65536 times as small as the scaled one
            np.testing.assert_allclose(rank["norms"][:2], made["fp32", fault][0]["norms"][:2], rtol=0.01)
            assert max(rank["norms"][:2]) > 0.05, "the clip was not active"
    for precision in ("fp32", "bf16"):
        assert made[precision, lives.FAULTS[0]][0]["scales"] == [1.0] * 6


@pytest.mark.covers("PREC-07", "LOOP-02")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_a_step_of_four_accumulated_micro_batches_is_that_of_float32(precision: str, clip: float) -> None:
    """Under SGD, whose step shows every wrong factor; a second scaler would be one of 65536."""

    def updates(precision: str, micro: int) -> dict[str, np.ndarray]:
        session = make_session(
            GPT,
            {"train": token_rows(64), "eval_fraction": 0.0},
            precision=precision,
            loop={"max_steps": 2, "micro_batch_size": micro},
            optim={"name": "sgd", "lr": 0.5, "momentum": 0.0, "warmup_steps": 0, "max_grad_norm": clip},
        )
        before = {name: value.detach().clone() for name, value in session.trainable.module.named_parameters()}
        train(session)
        after = dict(session.trainable.module.named_parameters())
        return {name: (after[name] - before[name]).detach().numpy() for name in before}

    reference, mine = updates("fp32", 16), updates(precision, 4)
    for name, wanted in reference.items():
        size = np.linalg.norm(wanted)
        assert size > 0 and np.linalg.norm(mine[name] - wanted) < 0.02 * size, name
    assert any((mine[name] != wanted).any() for name, wanted in reference.items()), "float32 was compared with itself"


def test_a_float16_run_finds_its_scale_by_itself() -> None:
    """Gradients so large that 2**16 overflows float16: the first steps are skipped and halve the scale; it trains."""
    session = make_session(
        MLP,
        {"train": class_rows(64), "eval_fraction": 0.0},
        precision="fp16",
        loop={"max_steps": 24, "global_batch_size": 64},
        optim={"warmup_steps": 0},
    )
    inner = session.trainable.loss

    def loss(module: torch.nn.Module, batch: dict[str, Any]) -> Any:
        out = inner(module, batch)
        return type(out)(loss=out.loss * 4096.0) if module.training else out

    session.trainable.loss = loss
    rows, outcome = train(session)
    skipped, scales = rows.of("train", "skipped_steps"), rows.of("train", "loss_scale")
    assert 3 < skipped[-1] < 16 and outcome.kind == "done"
    assert skipped[: skipped[-1]] == list(range(1, skipped[-1] + 1)), "it is a search: all at the beginning"
    assert scales[-1] == 2.0 ** (16 - skipped[-1])
    assert rows.losses[-1] < rows.losses[0]
