"""The parts of `bench infer` about generated text, in one process: batches, and transformers'
GPT-2 with the same weights."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate
from raytrain.infer.generate import Sampling, generate, greedy_answers
from raytrain.models.gpt import gpt
from raytrain.trainable import Trainable

VOCABULARY = 256  # bytes
#: Tokens/s of a batch of so many rows over those of single rows.
GOALS_BATCHED = {4: Goal(at_least=2.7), 16: Goal(at_least=4.0)}
GOAL_TRANSFORMERS = Goal(at_least=1.0)

Answering = Callable[[list[list[int]]], list[list[int]]]


def seeded_gpt(*, layers: int, heads: int, width: int, context: int, vocab_size: int, seed: int) -> Trainable:
    """A GPT with random weights that are the same in every process."""
    torch.manual_seed(seed)
    return gpt(layers=layers, heads=heads, width=width, context=context, vocab_size=vocab_size)


def context_of(options: Any) -> int:
    """Tokens of the longest prompt and answer."""
    return options.prompt + options.tokens


def bench_gpt(options: Any) -> nn.Module:
    """The model, with room for the longest prompt and answer."""
    made = seeded_gpt(
        layers=options.layers, heads=options.heads, width=options.width, context=context_of(options),
        vocab_size=VOCABULARY, seed=options.seed,
    )  # fmt: skip
    return made.module.eval().requires_grad_(False)


def prompts_of(options: Any, rows: int) -> list[list[int]]:
    """Random prompts of half to the full length; a batch of several sizes needs its padding."""
    draw = torch.Generator().manual_seed(options.seed)
    lengths = torch.randint(max(1, options.prompt // 2), options.prompt + 1, (rows,), generator=draw).tolist()
    return [torch.randint(VOCABULARY, (length,), generator=draw).tolist() for length in lengths]


def measure_batches(options: Any, found: BenchMeasurement, say: Say) -> None:
    """Tokens/s of our generation in batches, against single rows and transformers."""
    module = bench_gpt(options)
    sampling = Sampling(options.tokens)
    arms: dict[str, Answering] = {"ours": partial(generate, module, sampling=sampling, context=context_of(options))}
    if "transformers" in options.parts and _has_transformers(found):
        copy = transformers_gpt2(module)
        arms["transformers"] = lambda prompts: greedy_answers(copy, None, prompts, sampling=sampling, numbers=())
    if not _agree(options, found, arms):
        return
    blocks = {
        f"{name}, batch {rows}": partial(_per_token, answer, prompts_of(options, rows), options.tokens)
        for rows in options.batches
        for name, answer in arms.items()
    }
    say(f"{options.blocks} blocks of {len(blocks)} arms, {options.tokens} tokens a row")
    times = alternate(blocks, blocks=options.blocks)
    found.arms |= times
    found.values["tokens_per_s"] = {name: 1 / statistics.median(values) for name, values in times.items()}
    _compare_batches(options, found, times, arms)


def _compare_batches(
    options: Any, found: BenchMeasurement, times: Mapping[str, list[float]], arms: Mapping[str, Answering]
) -> None:
    single = min(options.batches)
    for rows in options.batches:
        if rows != single:
            found.compare(
                times, of=f"ours, batch {single}", to=f"ours, batch {rows}", goal=GOALS_BATCHED.get(rows),
                name=f"tokens/s, batch {rows} / batch {single}",
            )  # fmt: skip
    for rows in options.batches if "transformers" in arms else ():
        found.compare(
            times, of=f"transformers, batch {rows}", to=f"ours, batch {rows}", goal=GOAL_TRANSFORMERS,
            name=f"tokens/s, ours / transformers, batch {rows}",
        )  # fmt: skip


def _has_transformers(found: BenchMeasurement) -> bool:
    if importlib.util.find_spec("transformers") is not None:
        return True
    found.cannot("as fast as transformers' generate", "transformers is not installed")
    return False


def _agree(options: Any, found: BenchMeasurement, arms: Mapping[str, Answering]) -> bool:
    """Whether every arm gives the same tokens in batches as ours does row by row."""
    prompts = prompts_of(options, max(options.batches))
    single = [arms["ours"]([prompt])[0] for prompt in prompts]
    equal = True
    for name, answer in arms.items():
        wrong = sum(a != b for a, b in zip(answer(prompts), single, strict=True))
        detail = f"{len(prompts) - wrong} of {len(prompts)} answers are equal"
        equal &= found.gate(Check(f"{name}, in a batch: the tokens of single rows", not wrong, detail))
    return equal


def _per_token(answer: Answering, prompts: list[list[int]], tokens: int) -> float:
    """CPU seconds of a token."""
    began = time.process_time()
    answer(prompts)
    return (time.process_time() - began) / (len(prompts) * tokens)


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
