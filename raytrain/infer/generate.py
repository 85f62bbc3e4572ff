"""Generates text with a language model, token by token, without changing the state of the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def sample_text(
    module: nn.Module,
    prompt_ids: list[int],
    *,
    tokens: int,
    context: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int,
) -> list[int]:
    """Continue a prompt.

    Args:
        module: `forward(input_ids=(1, S))` returns {"logits": (1, S, V)} or an object with `.logits`.
        prompt_ids: at least one token; the model sees only the last `context` of them.
        tokens: how many to add.
        temperature: 0 picks the most likely token each time.
        top_k: sample from the k most likely tokens; None for all.
        seed: of a generator of its own, so that the run's generators are not advanced.
    Returns:
        the new tokens alone. The train mode of every submodule is restored.
    Raises:
        ValueError: an empty prompt.
    """
    if not prompt_ids:
        raise ValueError("the prompt is empty; give at least one token")
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    modes = [(part, part.training) for part in module.modules()]
    ids = list(prompt_ids)
    module.eval()
    try:
        for _ in range(tokens):
            window = torch.tensor([ids[-context:]], device=device)
            logits = _logits(module(input_ids=window))[0, -1].double().cpu()
            ids.append(_draw(logits, temperature=temperature, top_k=top_k, generator=generator))
    finally:
        for part, training in modes:
            part.training = training
    return ids[len(prompt_ids) :]


def _logits(output: Any) -> Tensor:
    return output["logits"] if isinstance(output, dict) else output.logits


def _draw(logits_V: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
    probabilities = torch.softmax(logits_V / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def language_sample(
    module: nn.Module, source: Any, *, context: int | None, tokens: int = 400, seed: int = 0
) -> dict[str, Any] | None:
    """{"prompt", "text", "temperature"}: a language model's continuation of the start of its eval text.

    Args:
        module: the model.
        source: the opened text source, which turns tokens into text and back.
        context: the number of tokens that the model sees at once.
    Returns:
        None if the module gives no logits for `forward(input_ids=...)` alone.
    """
    split = source.eval or source.train
    prompt = split.gather(split.eval_order()[:1])["input_ids"][0].tolist()[: min(32, context or 32)]
    try:
        ids = sample_text(module, prompt, tokens=tokens, context=context or len(prompt), seed=seed)
    except (TypeError, AttributeError, KeyError):  # a user's forward that needs labels, or returns no logits
        return None
    return {"prompt": source.decode(prompt), "text": source.decode(ids), "temperature": 0.8}
