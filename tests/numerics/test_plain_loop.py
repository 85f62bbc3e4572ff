"""ARCHITECTURE.md, 1: one worker in float32 is a plain PyTorch loop, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lab import GPT, MLP, class_rows, digest, make_session, token_rows, train
from plain import Trained, plain_loop
from torch import nn

from raytrain.models.gpt import gpt
from raytrain.models.mlp import mlp
from raytrain.train.session import Session

pytestmark = pytest.mark.daily

ROWS, HELD_OUT, BATCH, MICRO, STEPS, EVERY, CLIP = 88, 26, 18, 6, 66, 10, 0.4
"""88 rows in windows of 18: the fifth of an epoch has 16, in micro-batches of 6, 6 and 4. 26 rows: 24 and 2."""

CASES: dict[str, dict[str, Any]] = {
    "gpt": {"model": GPT, "rows": token_rows},
    "gpt with dropout": {"model": {**GPT, "dropout": 0.1}, "rows": token_rows},
    "mlp": {"model": MLP, "rows": class_rows},
    "mlp with dropout": {"model": {**MLP, "dropout": 0.2}, "rows": class_rows},
}


def ours(case: dict[str, Any]) -> Session:
    data = {"train": case["rows"](ROWS, seed=1), "eval": case["rows"](HELD_OUT, seed=2)}
    return make_session(
        case["model"],
        data,
        loop={"max_steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": MICRO, "eval_every": EVERY},
        optim={"max_grad_norm": CLIP, "warmup_steps": 5},
        seed=7,
    )


def plainly(case: dict[str, Any], *, torch_clip: bool = False) -> tuple[Trained, nn.Module]:
    """The same model from the same seed, each epoch's rows in the order of (seed, epoch); then nothing of ours."""
    module = built(case, seed=7)
    outcome = plain_loop(
        module,
        plain_loss,
        case["rows"](ROWS, seed=1),
        case["rows"](HELD_OUT, seed=2),
        lambda epoch: np.random.Generator(np.random.PCG64(np.random.SeedSequence([7, epoch]))).permutation(ROWS),
        steps=STEPS,
        batch=BATCH,
        micro=MICRO,
        lr=0.003,
        warmup=5,
        clip=CLIP,
        eval_every=EVERY,
        torch_clip=torch_clip,
    )
    return outcome, module


def built(case: dict[str, Any], *, seed: int) -> nn.Module:
    """The built-in model, built right after seeding."""
    keys = {name: value for name, value in case["model"].items() if name != "builder"}
    torch.manual_seed(seed)
    built = gpt(**keys) if "heads" in keys else mlp(**keys, num_features=12, num_classes=4)
    return built.module.train()


def plain_loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy, written out."""
    if "input_ids" in batch:
        logits = module(batch["input_ids"])["logits"]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return nn.functional.cross_entropy(module(batch["x"]), batch["labels"])


@pytest.mark.covers("DEV-18", "PREC-04")
@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_of_a_plain_loop_bit_for_bit(name: str) -> None:
    session = ours(CASES[name])
    rows, outcome = train(session)
    plain, module = plainly(CASES[name])
    assert outcome.kind == "done" and len(rows.losses) == STEPS == session.state.step
    assert rows.losses == plain.losses  # == of doubles: every bit
    assert digest(session.trainable.module.state_dict()) == digest(module.state_dict())
    assert list(zip(rows.of("eval", "step"), rows.of("eval", "loss"), strict=True)) == plain.evals
    np.testing.assert_allclose(rows.of("train", "grad_norm"), plain.norms, rtol=1e-12)
    clipped = sum(norm > CLIP for norm in plain.norms)
    assert clipped > 5, "the clip was hardly ever active"
    assert rows.losses[-1] < rows.losses[0]


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_torchs_own_clip_gives_the_same_within_its_float32_norm(name: str) -> None:
    session = ours(CASES[name])
    rows, _ = train(session)
    plain, module = plainly(CASES[name], torch_clip=True)
    np.testing.assert_allclose(rows.losses, plain.losses, rtol=0, atol=1e-6)
    np.testing.assert_allclose(rows.of("train", "grad_norm")[:3], plain.norms[:3], rtol=1e-6)
    mine, theirs = session.trainable.module.state_dict(), module.state_dict()
    worst = max(float((mine[key] - theirs[key]).abs().max()) for key in mine)
    assert worst < 1e-6
