"""Causal self-attention, whole or in a sliding window; neither holds S x S weights nor, unwindowed, any mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.models.mask_cache import MaskCache


class Attention(nn.Module):
    """Causal self-attention with one fused projection; no bias (its key bias would have no gradient).

    Args:
        window: each token sees itself and the `window - 1` before it; None = all before it.
    """

    def __init__(self, width: int, heads: int, dropout: float, *, window: int | None = None) -> None:
        super().__init__()
        self.heads, self.dropout, self.window = heads, dropout, window
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        if window is not None:
            self.masks = MaskCache()

    def forward(self, x_BSD: Tensor) -> Tensor:
        B, S, D = x_BSD.shape
        parts = self.qkv(x_BSD).split(D, dim=2)
        q, k, v = (part.view(B, S, self.heads, D // self.heads).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        if self.window is None or self.window >= S:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            y = windowed_attention(q, k, v, window=self.window, masks=self.masks, dropout=dropout)
        return self.out(y.transpose(1, 2).reshape(B, S, D))

    def _apply(self, fn: object, recurse: bool = True) -> Attention:
        if self.window is not None:  # to another device or dtype
            self.masks.clear()
        return super()._apply(fn, recurse)  # pyright: ignore[reportArgumentType, reportReturnType]


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, masks: MaskCache, dropout: float = 0.0
) -> Tensor:
    """Attention of each token to itself and the `window - 1` before it; (B, H, S, d), S longer than the window.

    In chunks of the window's length: a chunk's queries see keys of their own chunk and the one before only, so that
    time and memory grow with S x window and not with S x S, and one mask of window x 2 window serves all chunks.
    """
    S = q.shape[2]
    chunks = -(-S // window)
    q, k, v = (F.pad(part, (0, 0, 0, chunks * window - S)) for part in (q, k, v))  # behind every query: never seen
    first = F.scaled_dot_product_attention(
        q[:, :, :window], k[:, :, :window], v[:, :, :window], dropout_p=dropout, is_causal=True
    )
    mask = masks.get(
        "window", window, device=q.device, dtype=torch.bool, build=lambda: window_mask(window, device=q.device)
    )
    rest = F.scaled_dot_product_attention(
        _chunks(q[:, :, window:], window), _pairs(k, window), _pairs(v, window), attn_mask=mask, dropout_p=dropout
    )
    B, H, _, d = q.shape
    rest = rest.view(B, chunks - 1, H, window, d).transpose(1, 2).reshape(B, H, (chunks - 1) * window, d)
    return torch.cat([first, rest], dim=2)[:, :, :S]


def window_mask(window: int, *, device: torch.device) -> Tensor:
    """(window, 2 window) bool: query i of a chunk sees key j of the chunk before and its own, counted through."""
    i = torch.arange(window, device=device).unsqueeze(1)
    j = torch.arange(2 * window, device=device)
    return (j > i) & (j <= i + window)


def _chunks(x: Tensor, window: int) -> Tensor:
    """(B, H, n window, d) -> (B n, H, window, d)."""
    B, H, S, d = x.shape
    return x.view(B, H, S // window, window, d).transpose(1, 2).reshape(-1, H, window, d)


def _pairs(x: Tensor, window: int) -> Tensor:
    """Each chunk but the first behind the one before it: (B, H, (n + 1) window, d) -> (B n, H, 2 window, d)."""
    return torch.cat([_chunks(x[:, :, :-window], window), _chunks(x[:, :, window:], window)], dim=2)
