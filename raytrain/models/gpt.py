"""A decoder-only transformer: pre-norm, learned positions, tied head, no biases."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.models.attention import Attention, KeyValueCache
from raytrain.models.sizes import check_gpt, language_flops
from raytrain.trainable import IGNORED_LABEL, Batch, LossOutput, Trainable, accuracy, need_keys

INIT_STD = 0.02
COLUMNS = 64
"""Tensor cores are fast on products whose columns are a multiple of it: on an H200 GPT-2's head took 31.1 ms a step
with 50,257 columns, and 4.9 with 50,304."""


__all__ = ["gpt"]


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x)))


class PreNorm(nn.Module):
    """The parts of a pre-norm block around any feed-forward module; subclasses define `forward`."""

    def __init__(
        self, width: int, heads: int, dropout: float, feed_forward: nn.Module, *, window: int | None = None
    ) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, dropout, window=window)
        self.norm_feed_forward = nn.LayerNorm(width, bias=False)
        self.feed_forward = feed_forward
        self.dropout = dropout

    def attend(self, x_BSD: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """The first half of the block: x plus its attention."""
        return x_BSD + self.drop(self.attention(self.norm_attention(x_BSD), cache))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Block(PreNorm):
    """One pre-norm block around any feed-forward (..., D) -> (..., D)."""

    def forward(self, x_BSD: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x_BSD = self.attend(x_BSD, cache)
        return x_BSD + self.drop(self.feed_forward(self.norm_feed_forward(x_BSD)))


class Head(nn.Linear):
    """The tied head (..., D) -> (..., V) without a bias, and in training on a GPU more columns, up to a multiple of
    `COLUMNS`. Those are minus infinity: they change no loss, and get no gradient. The weight stays (V, D)."""

    pads = False  # on other devices too, for tests

    def forward(self, input: Tensor) -> Tensor:
        missing = -self.out_features % COLUMNS
        if not (missing and self.training and (input.is_cuda or self.pads)):
            return super().forward(input)
        bias = F.pad(self.weight.new_zeros(self.out_features), (0, missing), value=-math.inf)
        return F.linear(input, F.pad(self.weight, (0, 0, 0, missing)), bias)


class GPT(nn.Module):
    """A decoder from token ids to next-token logits, with the given blocks (B, S, D) -> (B, S, D), whose residual
    projections are named `out` and which have a dropout of their own."""

    def __init__(
        self, blocks: Sequence[nn.Module], *, width: int, context: int, vocab_size: int, dropout: float
    ) -> None:
        super().__init__()
        self.context, self.dropout = context, dropout
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = Head(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        # normal(0, 0.02); residual projections are scaled by 1 / sqrt(2L) for L blocks
        residual = INIT_STD / math.sqrt(2 * max(1, len(self.blocks)))
        nn.init.normal_(self.positions, std=INIT_STD)
        nn.init.normal_(self.tokens.weight, std=INIT_STD)
        for name, module in self.blocks.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=residual if name.endswith(".out") else INIT_STD)

    def embed(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """(B, S) ids -> (B, S, D). Raises ValueError if S is longer than the context."""
        S = input_ids.shape[1]
        if self.context < S:
            raise ValueError(f"a sequence of {S} tokens is longer than the context of {self.context}")
        if cache is not None and not cache.is_empty:
            return self.tokens(input_ids) + self.positions[cache.positions(input_ids.device)]
        positions = self.positions if self.context == S else self.positions[:S]
        x_BSD = self.tokens(input_ids) + positions
        return F.dropout(x_BSD, self.dropout, self.training) if self.dropout else x_BSD

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Final norm and the tied head: (B, S, D) -> (B, S, V), or more columns (see `Head`)."""
        return self.head(self.norm(x_BSD))

    @property
    def takes_cache(self) -> bool:
        """Whether `forward` gives the same logits with a `cache`."""
        return True

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, *, cache: KeyValueCache | None = None
    ) -> dict[str, Tensor]:
        """Return {"logits"} without labels; with labels {"loss"}, and in evaluation also "logits".

        Args:
            input_ids: (B, S) int64.
            labels: (B, S) int64, labels[t] is the token after input_ids[t], or -100 to ignore it.
            cache: of these rows, to generate: the first call gives it the padded prompts, each later one (B, 1) tokens.
        """
        x_BSD = self.embed(input_ids, cache)
        for block in self.blocks:
            x_BSD = block(x_BSD) if cache is None else block(x_BSD, cache)
        if cache is not None:
            x_BSD = cache.end_pass(x_BSD)
        return self.outputs(self.logits(x_BSD), labels)

    def outputs(self, logits_BSV: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
        """Build what `forward` returns; in training the logits are not returned, so their memory can be freed."""
        if labels is None:
            return {"logits": logits_BSV[..., : self.head.out_features]}
        loss = token_loss(logits_BSV, labels)
        return {"loss": loss} if self.training else {"loss": loss, "logits": logits_BSV}


def token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean cross entropy over the labels other than -100, in at least float32."""
    logits = logits_BSV.flatten(0, 1)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits, labels_BS.flatten(), ignore_index=IGNORED_LABEL)


def language_loss(module: nn.Module, batch: Batch, *optional: str) -> LossOutput:
    """Loss of one batch {"input_ids", "labels"}; next-token accuracy in evaluation only. `optional`: further keys
    that the module takes, passed on where the batch has them."""
    need_keys(batch, "input_ids", "labels")
    further = {name: batch[name] for name in optional if name in batch}
    out = module(input_ids=batch["input_ids"], labels=batch["labels"], **further)
    metrics = {"accuracy": accuracy(out["logits"], batch["labels"])} if "logits" in out else {}
    return LossOutput(out["loss"], aux=out.get("aux"), metrics=metrics)


def gpt(
    *,
    layers: int,
    heads: int,
    width: int,
    context: int,
    dropout: float = 0.0,
    vocab_size: int,
    window: int | None = None,
) -> Trainable:
    """Build a GPT on batches {"input_ids": (B, S), "labels": (B, S)} with S <= context.

    Args:
        window: tokens that each token attends to, including itself; None = the full context.
    Raises ValueError for incompatible sizes.

    Example:
        >>> import torch
        >>> from raytrain.models.gpt import gpt
        >>> trainable = gpt(layers=2, heads=2, width=16, context=8, vocab_size=256)
        >>> ids = torch.tensor([list(b"the mill")])
        >>> trainable.module(input_ids=ids)["logits"].shape
        torch.Size([1, 8, 256])
        >>> batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
        >>> 5 < trainable.loss(trainable.module, batch).loss.item() < 6  # about log(256) before the first step
        True
    """
    check_gpt(
        layers=layers, heads=heads, width=width, context=context, dropout=dropout, vocab_size=vocab_size, window=window
    )
    blocks = [Block(width, heads, dropout, FeedForward(width, 4 * width), window=window) for _ in range(layers)]
    module = GPT(blocks, width=width, context=context, vocab_size=vocab_size, dropout=dropout)
    parameters = sum(p.numel() for p in module.parameters()) - module.positions.numel()
    flops = language_flops(matmul_parameters=parameters, layers=layers, width=width, context=context, window=window)
    return Trainable(module, language_loss, blocks="blocks", flops_per_sample=flops)
