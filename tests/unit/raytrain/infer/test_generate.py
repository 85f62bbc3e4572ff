"""Sampling text: what is drawn, and that the run does not notice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain.infer.generate import sample_text
from raytrain.models.gpt import gpt


class Successor(nn.Module):
    """Says that after t comes t + 1 (of 10), and remembers how it was called."""

    def __init__(self, sharpness: float = 20.0, *, as_object: bool = False) -> None:
        super().__init__()
        self.sharpness, self.as_object = nn.Parameter(torch.tensor(sharpness)), as_object
        self.frozen = nn.Dropout(0.5).eval()
        self.windows: list[list[int]] = []

    def forward(self, input_ids: Tensor) -> Any:
        assert not self.training
        self.windows.append(input_ids[0].tolist())
        logits = self.sharpness * nn.functional.one_hot((input_ids + 1) % 10, 10)
        return SimpleNamespace(logits=logits) if self.as_object else {"logits": logits}


@pytest.mark.parametrize("as_object", [False, True])
def test_generation_gives_the_likely_continuation_of_the_context(as_object: bool) -> None:
    module = Successor(as_object=as_object)
    assert sample_text(module, [3, 4, 5], tokens=6, context=4, seed=0) == [6, 7, 8, 9, 0, 1]
    assert module.windows[0] == [3, 4, 5] and module.windows[-1] == [7, 8, 9, 0]


def test_modes_random_state_and_weights_are_unchanged() -> None:
    module, state = Successor(), torch.get_rng_state()
    sample_text(module, [1], tokens=5, context=8, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training and not module.frozen.training
    with pytest.raises(ValueError, match="longer than the context"):
        made = gpt(layers=1, heads=1, width=4, context=2, vocab_size=5)
        sample_text(made.module, [1, 2, 3], tokens=1, context=3, seed=0)
    assert made.module.training


def test_the_seed_decides() -> None:
    torch.manual_seed(0)
    module = gpt(layers=1, heads=2, width=8, context=6, vocab_size=50).module

    def draw(seed: int, **options: Any) -> list[int]:
        return sample_text(module, [1, 2], tokens=30, context=6, seed=seed, **options)

    assert draw(1) == draw(1) and draw(1) != draw(2)
    assert len(draw(1)) == 30 and set(draw(1)) <= set(range(50))
    assert draw(1, temperature=0) == draw(2, temperature=0) == draw(3, top_k=1)
    assert len(set(draw(1, top_k=None))) > len(set(draw(1, temperature=0)))


def test_top_k_bounds_the_drawn_tokens() -> None:
    module = Successor(sharpness=1.0)
    drawn = {sample_text(module, [4], tokens=1, context=1, seed=seed, top_k=1)[0] for seed in range(20)}
    spread = {sample_text(module, [4], tokens=1, context=1, seed=seed, top_k=None)[0] for seed in range(20)}
    assert drawn == {5} and len(spread) > 3


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        sample_text(Successor(), [], tokens=1, context=1, seed=0)
