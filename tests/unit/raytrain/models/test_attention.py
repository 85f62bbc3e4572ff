"""Attention without masks, sliding windows, and the cache of the masks that those need."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from lab import GPT, make_session, token_rows, train
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raytrain.models.attention import BUDGET, Attention, MaskCache, window_mask, windowed_attention
from raytrain.models.gpt import gpt

CPU, META = torch.device("cpu"), torch.device("meta")


def causal(length: int, device: torch.device = CPU, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(length, length, device=device, dtype=torch.bool).tril().to(dtype)


def cached(cache: MaskCache, length: int, device: torch.device = CPU, dtype: torch.dtype = torch.bool) -> Tensor:
    return cache.get("causal", length, device=device, dtype=dtype, build=lambda: causal(length, device, dtype))


# ---------------------------------------------------------------- the cache


@pytest.mark.covers("ATTN-01")
def test_a_mask_is_the_same_object_for_the_same_length_device_and_dtype() -> None:
    cache = MaskCache()
    assert len(cache) == 0
    first = cached(cache, 8)
    assert cached(cache, 8) is first and (cache.hits, cache.misses) == (1, 1)
    others = [cached(cache, 9), cached(cache, 8, device=META), cached(cache, 8, dtype=torch.float32)]
    others.append(cache.get("window", 8, device=CPU, dtype=torch.bool, build=lambda: window_mask(8, device=CPU)))
    assert len({id(mask) for mask in (first, *others)}) == 5 == len(cache)
    assert (cache.hits, cache.misses) == (1, 5)


@pytest.mark.covers("ATTN-02", "PERF-25")
def test_a_ramp_of_lengths_stays_under_the_budget_and_one_mask_of_1024_is_a_mebibyte() -> None:
    cache, most = MaskCache(), 0
    lengths = range(2, 1025)
    for length in lengths:
        cached(cache, length)
        most = max(most, cache.bytes)
    assert len(lengths) == 1023 and sum(n * n for n in lengths) >> 20 == 341, "what an unbounded cache would hold"
    assert BUDGET == 8 * 2**20 and BUDGET - 2**20 < most <= BUDGET and cache.misses == 1023
    assert cached(cache, 1024).nbytes == 2**20
    kept = len(cache)
    assert cached(cache, 1020) is cached(cache, 1020) and len(cache) == kept
    cache.budget = 2**20
    assert len(cache) == 1 and cache.bytes <= 2**20, "the least recently used leave first"
    cache.budget = 0
    assert cached(cache, 4) is not cached(cache, 4) and len(cache) == 0


@pytest.mark.covers("ATTN-03")
def test_clearing_frees_the_masks_and_moving_a_module_clears_them() -> None:
    layer = Attention(8, 2, 0.0, window=2)
    layer(torch.randn(1, 6, 8))
    (kept,) = layer.masks._masks.values()
    layer.masks.clear()
    assert len(layer.masks) == 0 == layer.masks.bytes
    layer(torch.randn(1, 6, 8))
    (again,) = layer.masks._masks.values()
    assert again is not kept and layer.masks.misses == 2
    layer.to(torch.float64)
    assert len(layer.masks) == 0


@pytest.mark.covers("ATTN-04")
def test_a_logged_row_has_the_contents_and_statistics_of_the_mask_cache() -> None:
    data = {"train": token_rows(32), "eval_fraction": 0.0}
    session = make_session({**GPT, "window": 4}, data, loop={"max_steps": 3})
    rows, _ = train(session)
    found = [row["mask_cache"] for row in rows.rows if row["kind"] == "train"]
    mask = 4 * 8  # one of window x 2 window in each of the two layers, looked up once in each pass
    assert found == [{"entries": 2, "bytes": 2 * mask, "hits": 2 * step, "misses": 2} for step in range(3)]
    plain, _ = train(make_session(GPT, data, loop={"max_steps": 1}))
    assert "mask_cache" not in plain.rows[0]


@pytest.mark.covers("ATTN-05")
def test_masks_are_in_no_state_and_in_no_pickle() -> None:
    layer = Attention(8, 2, 0.0, window=2)
    before = len(pickle.dumps(layer))
    layer(torch.randn(1, 600, 8))
    assert len(layer.masks) == 1
    assert set(layer.state_dict()) == {"qkv.weight", "out.weight"} and len(pickle.dumps(layer)) == before
    assert len(pickle.loads(pickle.dumps(layer)).masks) == 0


# ---------------------------------------------------------------- attention


class Made(TorchDispatchMode):
    """Counts results that are as large as a mask: bool tensors, and any that are S x S in their last dimensions."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.masks, self.squares = length, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, Tensor):
                self.masks += value.dtype is torch.bool
                self.squares += value.shape[-2:] == (self.length, self.length)
        return out


def manual(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


@pytest.mark.covers("ATTN-06", "FUT-08")
def test_causal_attention_equals_the_explicit_one_without_a_mask() -> None:
    torch.manual_seed(1)
    layer, x = Attention(24, 3, 0.0), torch.randn(2, 40, 24)
    with Made(40) as made:
        y = layer(x)
        y.sum().backward()
    assert (made.masks, made.squares) == (0, 0)
    q, k, v = (part.view(2, 40, 3, 8).transpose(1, 2) for part in layer.qkv(x).split(24, dim=2))
    with Made(40) as made:
        expected = manual(q, k, v, causal(40))
    assert made.masks and made.squares, "the count can see them"
    torch.testing.assert_close(y, layer.out(expected.transpose(1, 2).reshape(2, 40, 24)), rtol=0, atol=1e-5)
    trainable = gpt(layers=2, heads=2, width=16, context=33, vocab_size=9)
    ids = torch.randint(9, (2, 33))
    with Made(33) as made:
        loss = trainable.module(ids, ids)["loss"]
        loss.backward()
    assert made.squares == 0 and loss.isfinite()


@pytest.mark.covers("ATTN-08")
@pytest.mark.parametrize("window", [None, 3])
def test_attention_runs_on_a_cpu_and_on_meta(window: int | None) -> None:
    for device in (CPU, META):
        layer = Attention(8, 2, 0.0, window=window).to(device)
        y = layer(torch.ones(2, 7, 8, device=device))
        assert y.shape == (2, 7, 8) and y.device.type == device.type


@pytest.mark.parametrize(("length", "window"), [(12, 4), (13, 4), (5, 4), (9, 1), (16, 5), (31, 8)])
def test_a_window_attends_to_itself_and_the_tokens_right_before_it(length: int, window: int) -> None:
    draw = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, 4, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3))
    seen = causal(length) & ~torch.ones(length, length, dtype=torch.bool).tril(-window)
    ours, theirs = windowed_attention(q, k, v, window=window, masks=MaskCache()), manual(q, k, v, seen)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weight = torch.randn(ours.shape, generator=draw, dtype=torch.float64)
    mine = torch.autograd.grad((ours * weight).sum(), (q, k, v))
    expected = torch.autograd.grad((theirs * weight).sum(), (q, k, v))
    for gradient, other in zip(mine, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-12)


def test_a_window_as_long_as_the_context_is_plain_causal_attention() -> None:
    torch.manual_seed(2)
    wide, x = Attention(8, 2, 0.0, window=6), torch.randn(1, 6, 8)
    plain = Attention(8, 2, 0.0)
    plain.load_state_dict(wide.state_dict())
    assert torch.equal(wide(x), plain(x)) and wide.masks.misses == 0


def test_window_memory_grows_with_the_length_and_not_with_its_square() -> None:
    def largest(length: int) -> int:
        class Largest(TorchDispatchMode):
            most = 0

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                if isinstance(out, Tensor):
                    Largest.most = max(Largest.most, out.numel())
                return out

        x = torch.ones(1, 1, length, 4)
        with Largest():
            windowed_attention(x, x, x, window=8, masks=MaskCache())
        return Largest.most

    assert largest(512) <= 2.1 * largest(256)
