"""The arms that `bench infer` compares generation with: a plain batched loop, and transformers' GPT-2."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def plain_answers(module: nn.Module, prompts: list[list[int]], *, tokens: int) -> list[list[int]]:
    """Continue prompts greedily, as a script of forty lines does: left padding, a mask, and a cache that grows with
    `torch.cat`. Uses the weights of our GPT, but none of its forward."""
    made: Any = module
    rows, longest = len(prompts), max(map(len, prompts))
    ids = torch.zeros(rows, longest, dtype=torch.int64)
    seen = torch.zeros(rows, longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], seen[row, longest - len(prompt) :] = torch.tensor(prompt), True
    positions = (seen.long().cumsum(1) - 1).clamp(min=0)
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    mask = (causal & seen[:, None, None]) | torch.eye(longest, dtype=torch.bool)
    cache: list[tuple[Tensor, Tensor] | None] = [None] * len(made.blocks)
    answer = []
    for _ in range(tokens):
        x_BSD = made.tokens(ids) + made.positions[positions]
        for number, block in enumerate(made.blocks):
            q, k, v = _heads(block, x_BSD)
            held = cache[number]
            if held is not None:
                k, v = torch.cat([held[0], k], 2), torch.cat([held[1], v], 2)
            cache[number] = (k, v)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x_BSD = x_BSD + block.attention.out(y.transpose(1, 2).reshape(x_BSD.shape))
            hidden = F.gelu(block.feed_forward.up(block.norm_feed_forward(x_BSD)))
            x_BSD = x_BSD + block.feed_forward.out(hidden)
        ids = made.head(made.norm(x_BSD[:, -1:])).argmax(-1)
        answer.append(ids[:, 0])
        seen = torch.cat([seen, torch.ones(rows, 1, dtype=torch.bool)], 1)
        mask, positions = seen[:, None, None], positions[:, -1:] + 1
    return torch.stack(answer, 1).tolist()


def _heads(block: Any, x_BSD: Tensor) -> list[Tensor]:
    """Queries, keys and values, (B, H, S, d)."""
    B, S, D = x_BSD.shape
    heads = block.attention.heads
    parts = block.attention.qkv(block.norm_attention(x_BSD)).split(D, 2)
    return [part.view(B, S, heads, D // heads).transpose(1, 2) for part in parts]


def transformers_gpt2(module: nn.Module) -> nn.Module:
    """transformers' GPT-2 with the weights of our GPT, whose missing biases are zeros there: the same function."""
    from transformers import GPT2Config, GPT2LMHeadModel

    made: Any = module
    vocabulary, width = made.tokens.weight.shape
    config = GPT2Config(
        n_layer=len(made.blocks), n_head=made.blocks[0].attention.heads, n_embd=width, vocab_size=vocabulary,
        n_positions=made.context, activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    copy: Any = GPT2LMHeadModel(config).eval()
    weights = {name: torch.zeros_like(value) for name, value in copy.state_dict().items() if name.endswith(".bias")}
    weights["transformer.wte.weight"] = weights["lm_head.weight"] = made.tokens.weight
    weights["transformer.wpe.weight"], weights["transformer.ln_f.weight"] = made.positions, made.norm.weight
    for number, block in enumerate(made.blocks):
        weights |= {
            f"transformer.h.{number}.{name}": value
            for name, value in {
                "ln_1.weight": block.norm_attention.weight, "attn.c_attn.weight": block.attention.qkv.weight.t(),
                "attn.c_proj.weight": block.attention.out.weight.t(), "ln_2.weight": block.norm_feed_forward.weight,
                "mlp.c_fc.weight": block.feed_forward.up.weight.t(),
                "mlp.c_proj.weight": block.feed_forward.out.weight.t(),
            }.items()
        }  # fmt: skip
    copy.load_state_dict(weights)
    return copy
