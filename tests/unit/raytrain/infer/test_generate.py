"""Generated tokens: with and without a cache, alone and in a batch, greedy and drawn; the run does not notice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.config import ExpertsConfig
from experts.models import moe_gpt
from raytrain.infer import generate as generation
from raytrain.infer.generate import Sampling, choose, cut_at_stop, generate
from raytrain.models import attention as cache
from raytrain.models.attention import KeyValueCache
from raytrain.models.gpt import gpt

PROMPTS = [[1, 2, 3], [4] * 20, [7, 8], [9] * 11, [5]]


class Successor(nn.Module):
    """Says that after t comes t + 1 (of 10), and remembers how it was called."""

    def __init__(self, sharpness: float = 20.0, *, as_object: bool = False) -> None:
        super().__init__()
        self.sharpness, self.as_object = nn.Parameter(torch.tensor(sharpness)), as_object
        self.frozen = nn.Dropout(0.5).eval()
        self.windows: list[list[list[int]]] = []

    def forward(self, input_ids: Tensor) -> Any:
        assert not self.training
        self.windows.append(input_ids.tolist())
        logits = self.sharpness * nn.functional.one_hot((input_ids + 1) % 10, 10)
        return SimpleNamespace(logits=logits) if self.as_object else {"logits": logits}


def language_model(kind: str, *, window: int | None = None, context: int = 64) -> nn.Module:
    """A small model in float64, so that rounding does not decide between tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 2, "heads": 2, "width": 32, "context": context, "vocab_size": 50}
    if kind == "gpt":
        return gpt(**sizes, window=window).module.double()
    capacity = 0.6 if kind == "moe with capacity" else None
    return moe_gpt(**sizes, window=window, experts=ExpertsConfig(capacity_factor=capacity)).module.double()


@pytest.mark.parametrize("as_object", [False, True])
def test_generation_gives_the_likely_continuation_of_the_context(as_object: bool) -> None:
    module = Successor(as_object=as_object)
    assert generate(module, [[3, 4, 5]], sampling=Sampling(6), context=4) == [[6, 7, 8, 9, 0, 1]]
    assert module.windows[0] == [[3, 4, 5]] and module.windows[-1] == [[7, 8, 9, 0]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("kind", "window"), [("gpt", None), ("gpt", 5), ("moe", None), ("moe with capacity", None)])
def test_answers_are_those_of_each_prompt_alone_without_a_cache(
    kind: str, window: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 new tokens: the cache ends when the longest row reaches the context of 64."""
    module, sampling = language_model(kind, window=window), Sampling(80, temperature, top_k=20, top_p=0.9, seed=3)
    together = generate(module, PROMPTS, sampling=sampling, context=64)
    monkeypatch.setattr(type(module), "takes_cache", False)
    alone = [
        generate(module, [prompt], sampling=sampling, rows=[row], context=64)[0] for row, prompt in enumerate(PROMPTS)
    ]
    assert together == alone
    assert [len(ids) for ids in together] == [80] * 5 and len({tuple(ids) for ids in together}) > 1


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_masks_begin_where_kernels_of_a_gpu_can_read_them(
    window: int | None, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask that begins elsewhere ended in a misaligned address on an H200: rows that leave move its beginning."""
    attend, begins, sizes = cache.F.scaled_dot_product_attention, set[int](), set[int]()

    def recorded(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor | None, **keys: Any) -> Tensor:
        for mask in masks:
            if mask is not None:
                begins.add(mask.data_ptr() % (cache.ALIGNED * mask.element_size()))
                sizes.add(len(mask))
        return attend(q, k, v, *masks, **keys)

    monkeypatch.setattr(cache.F, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(generation, "BLOCKS", {"cpu": 4} if static else {})
    monkeypatch.setattr(generation, "record", played_again([]))
    sampling = Sampling(60, 1.0, end_ids=frozenset(range(4)), seed=1)
    generate(language_model("gpt", window=window), PROMPTS, sampling=sampling, context=100)
    assert begins == {0} and len(sizes) > 1, "no row has left"


@pytest.mark.parametrize(("kind", "cached"), [("gpt", True), ("moe", True), ("moe with capacity", False)])
def test_a_model_with_a_cache_sees_each_token_once(kind: str, cached: bool) -> None:
    module, seen = language_model(kind), []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    generate(module, [[1, 2, 3], [4, 5]], sampling=Sampling(6), context=64)
    assert seen == ([3, 1, 1, 1, 1, 1] if cached else [3, 4, 5, 6, 7, 8])


def test_rows_that_end_leave_the_batch_and_change_no_other() -> None:
    module = language_model("gpt")
    whole = generate(module, PROMPTS, sampling=Sampling(30, 1.0), context=64)
    end = whole[1][4]
    ended = generate(module, PROMPTS, sampling=Sampling(30, 1.0, end_ids=frozenset({end})), context=64)
    for before, after in zip(whole, ended, strict=True):
        assert after == (before[: before.index(end)] if end in before else before)
    assert len(ended[1]) == whole[1].index(end) <= 4 and max(map(len, ended)) > 4


def played_again(made: list[int]) -> Any:
    """In the place of `record`: the graph is the function itself; `made` notes the rows of each."""

    def record(run: Any, device: torch.device) -> tuple[Any, Tensor]:
        assert device.type == "cpu"
        run()
        output = run()
        made.append(len(output))
        return lambda: output.copy_(run()), output

    return record


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("kind", "window"), [("gpt", None), ("gpt", 5), ("gpt", 45), ("moe", None)])
def test_a_static_cache_passes_made_again_and_blocks_of_tokens_change_no_answer(
    kind: str, window: int | None, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """110 new tokens: two spans of the cache, and rows that end within a block, at its end and after the cache's."""
    module = language_model(kind, window=window, context=100)
    sampling = Sampling(110, temperature, top_k=20, top_p=0.9, seed=3)
    whole = generate(module, PROMPTS, sampling=sampling, context=100)
    ends = replace(sampling, end_ids=frozenset({whole[1][10], whole[3][10]}))
    ended = generate(module, PROMPTS, sampling=ends, context=100)
    stops = replace(sampling, stop=(f" {whole[2][40]} {whole[2][41]} ",))
    words: Any = {"decode": lambda ids: "".join(f" {one} " for one in ids).replace("  ", " ")}
    stopped = generate(module, PROMPTS, sampling=stops, context=100, **words)
    made: list[int] = []
    monkeypatch.setattr(generation, "BLOCKS", {"cpu": 16})
    monkeypatch.setattr(cache, "SPAN", 40)
    monkeypatch.setattr(generation, "record", played_again(made))
    assert generate(module, PROMPTS, sampling=sampling, context=100) == whole and made == [5, 5]
    assert generate(module, PROMPTS, sampling=ends, context=100) == ended != whole
    assert generate(module, PROMPTS, sampling=stops, context=100, **words) == stopped != whole
    assert min(made[2:]) < 5, "rows that end leave, and the pass is made for fewer"


@pytest.mark.parametrize("spoilt", ["before", "after"])
def test_a_pass_that_cannot_be_captured_is_made_by_the_module_and_not_tried_again(
    spoilt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, tries = language_model("gpt"), []
    expected = generate(module, PROMPTS, sampling=Sampling(30), context=64)

    def record(run: Any, device: torch.device) -> Any:
        tries.append(device)
        if spoilt == "after":
            run()
        raise RuntimeError("it waits for the device\nhere")

    monkeypatch.setattr(generation, "BLOCKS", {"cpu": 4})
    monkeypatch.setattr(generation, "record", record)
    for _ in range(2):
        assert generate(module, PROMPTS, sampling=Sampling(30), context=64) == expected
    assert len(tries) == 1
    assert capsys.readouterr().err == "passes of one token are not captured: it waits for the device\n"
    monkeypatch.setattr(generation, "record", lambda run, device: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        generate(language_model("gpt"), PROMPTS, sampling=Sampling(30), context=64)


def test_caches_are_copied_only_when_a_share_of_the_rows_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    module = language_model("gpt")
    prompts = [[row, row + 1] for row in range(12)]
    whole = generate(module, prompts, sampling=Sampling(30, 1.0), context=64)
    ends = Sampling(30, 1.0, end_ids=frozenset(range(3)))
    kept: list[int] = []
    keep = KeyValueCache.keep
    monkeypatch.setattr(KeyValueCache, "keep", lambda held, rows: (kept.append(len(rows)), keep(held, rows))[1])
    found = generate(module, prompts, sampling=ends, context=64)
    first = [next((at for at, token in enumerate(row) if token < 3), 30) for row in whole]
    assert found == [row[:at] for row, at in zip(whole, first, strict=True)]
    assert 0 < len(kept) < len(set(first)) - 1, "more rows ended at different places"
    assert all(after <= 0.75 * before for before, after in pairwise([12, *kept]))


def test_stop_texts_end_an_answer() -> None:
    sizes = []
    module = Successor()
    module.register_forward_pre_hook(lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
    sampling = Sampling(6, stop=("56",))
    found = generate(module, [[3], [8]], sampling=sampling, decode=lambda ids: "".join(map(str, ids)))
    assert found == [[4, 5, 6], [9, 0, 1, 2, 3, 4]] and sizes == [2, 2, 2, 1, 1, 1]
    assert cut_at_stop("4567", ("7", "56")) == "4" and cut_at_stop("123", ("56",)) == "123"
    with pytest.raises(ValueError, match="decodes tokens"):
        generate(module, [[3]], sampling=sampling)


def test_draws_depend_on_the_seed_and_the_row_only() -> None:
    module = language_model("gpt")

    def draw(rows: list[int], seed: int) -> list[list[int]]:
        return generate(module, [[1, 2]] * len(rows), sampling=Sampling(20, 1.0, seed=seed), rows=rows, context=64)

    first, second = draw([7, 8], 1)
    assert first != second and draw([8], 1) == [second] and draw([8, 7], 1) == [second, first]
    assert draw([7], 2) != [first]


def test_draws_follow_the_probabilities() -> None:
    """1,000 draws at even places between 0 and 1 give each token its share exactly, to one draw."""
    probabilities = torch.tensor([0.5, 0.2, 0.05, 0.25], dtype=torch.float64)
    logits = probabilities.log().expand(1000, 4)
    even = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000

    def shares(**options: Any) -> list[float]:
        tokens = choose(logits, Sampling(1, **{"temperature": 1.0, **options}), even)
        return (torch.bincount(tokens, minlength=4) / 1000).tolist()

    assert shares() == pytest.approx([0.5, 0.2, 0.05, 0.25], abs=0.002)
    assert shares(top_k=2) == pytest.approx([2 / 3, 0, 0, 1 / 3], abs=0.002)
    assert shares(top_p=0.8) == pytest.approx([0.5 / 0.95, 0.2 / 0.95, 0, 0.25 / 0.95], abs=0.002)
    squared = probabilities**2 / (probabilities**2).sum()
    assert shares(temperature=0.5) == pytest.approx(squared.tolist(), abs=0.002)
    assert shares(temperature=0.0) == [1, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_top_k_of_equal_tokens_are_those_of_lower_number_in_any_batch(dtype: torch.dtype) -> None:
    """Logits in bf16 are often equal; the draws run through the chosen ones from the likeliest to the least likely."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, -0.0, 2.0, 0.0], [-1.0, -3.0, -2.0, -1.0, -2.0, -2.0, -5.0]]).to(dtype)
    even = (torch.arange(400, dtype=torch.float64) + 0.5) / 400

    def order(row: int, top_k: int | None) -> list[int]:
        found = choose(logits[row].expand(400, 7), Sampling(1, 1.0, top_k=top_k), even).tolist()
        return list(dict.fromkeys(found))

    assert order(0, 3) == [1, 2, 3] and order(0, 5) == [1, 2, 3, 5, 0] and order(0, None) == [1, 2, 3, 5, 0, 4, 6]
    assert order(1, 1) == [0] and order(1, 3) == [0, 3, 2] and order(1, 6) == order(1, None)[:6] == [0, 3, 2, 4, 5, 1]


def test_modes_random_state_and_weights_are_unchanged() -> None:
    module, state = Successor(), torch.get_rng_state()
    generate(module, [[1]], sampling=Sampling(5, 1.0))
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training and not module.frozen.training
    made = gpt(layers=1, heads=1, width=4, context=2, vocab_size=5).module
    with pytest.raises(ValueError, match="longer than the context"):
        generate(made, [[1, 2, 3]], sampling=Sampling(1), context=3)
    assert made.training


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(Successor(), [[1], []], sampling=Sampling(1))
