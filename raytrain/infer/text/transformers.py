"""Greedy generation with the model's own code, for models of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from raytrain.infer.text.generate import Sampling
from raytrain.trainable import MASK


@torch.no_grad()
def greedy_answers(
    module: nn.Module, codec: Any, prompts: list[list[int]], *, sampling: Sampling, numbers: Sequence[int]
) -> list[list[int]]:
    """Continue prompts, padded on the left, with `module.generate`; the answers without the token that ends them."""
    del numbers
    from transformers import GenerationConfig, StoppingCriteriaList

    device = next(module.parameters()).device
    ids, mask, pad = padded_left(prompts, sampling)
    longest = ids.shape[1]
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens, do_sample=False, num_beams=1, pad_token_id=pad,
        eos_token_id=sorted(sampling.end_ids) or None, use_cache=True,
    )  # fmt: skip
    ends = StoppingCriteriaList([_Stops(codec, sampling.stop, longest)]) if sampling.stop else None
    made: Any = module
    found = made.generate(
        input_ids=ids.to(device), **{MASK: mask.to(device)}, generation_config=config, stopping_criteria=ends
    )
    answers = []
    for row in found[:, longest:].tolist():
        end = next((at for at, token in enumerate(row) if token in sampling.end_ids), len(row))
        answers.append(row[:end])
    return answers


def padded_left(prompts: Sequence[Sequence[int]], sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(ids, mask, padding id) of prompts as transformers wants them to generate: (B, S) int64, S of the longest."""
    longest = max(map(len, prompts))
    pad = next(iter(sampling.end_ids), 0)
    ids = torch.full((len(prompts), longest), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = torch.tensor(prompt), 1
    return ids, mask, pad


class _Stops:
    """Ends the rows whose answer holds one of the stop texts."""

    def __init__(self, codec: Any, stop: Sequence[str], begin: int) -> None:
        self._codec, self._stop, self._begin = codec, stop, begin

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        texts = [self._codec.decode(row) for row in input_ids[:, self._begin :].tolist()]
        done = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(done, device=input_ids.device)
