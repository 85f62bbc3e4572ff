"""The parts of `bench infer` about generated text, in one process: batches, transformers, long answers."""

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
from jobs.bench.inference.infer_models import VOCABULARY, seeded_gpt
from jobs.bench.inference.infer_plain import plain_answers, transformers_gpt2
from raytrain.infer.generate import Sampling, generate, greedy_answers

#: Tokens/s of a batch of so many rows over those of single rows.
GOALS_BATCHED = {4: Goal(at_least=2.7), 16: Goal(at_least=4.0)}
GOAL_PLAIN, GOAL_TRANSFORMERS = Goal(at_least=0.95), Goal(at_least=1.0)
#: Tokens/s of the last tenth of a long answer over those of its first tenth.
GOAL_LENGTH = Goal(at_least=0.6)
TENTH = 10

Answering = Callable[[list[list[int]]], list[list[int]]]


def context_of(options: Any) -> int:
    """Tokens of the longest prompt and answer."""
    return options.prompt + max(options.tokens, options.long)


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
    """Tokens/s of our generation in batches, against single rows, a plain loop and transformers."""
    module = bench_gpt(options)
    sampling = Sampling(options.tokens)
    arms: dict[str, Answering] = {
        "ours": partial(generate, module, sampling=sampling, context=context_of(options)),
        "plain loop": partial(plain_answers, module, tokens=options.tokens),
    }  # fmt: skip
    if "transformers" in options.parts and _has_transformers(found):
        copy = transformers_gpt2(module)
        arms["transformers"] = lambda prompts: greedy_answers(copy, None, prompts, sampling=sampling, numbers=())
    if not _agree(options, found, arms):
        return
    wall: dict[str, list[float]] = {}
    blocks = {
        f"{name}, batch {rows}": partial(
            _per_token, answer, prompts_of(options, rows), options.tokens, wall.setdefault(f"{name}, batch {rows}", [])
        )
        for rows in options.batches
        for name, answer in arms.items()
    }
    say(f"{options.blocks} blocks of {len(blocks)} arms, {options.tokens} tokens a row")
    times = alternate(blocks, blocks=options.blocks)
    found.arms |= times
    wall = {name: values[-options.blocks :] for name, values in wall.items()}
    found.values["tokens_per_s"] = {name: 1 / statistics.median(values) for name, values in times.items()}
    found.values["tokens_per_s_of_the_clock"] = {name: 1 / statistics.median(values) for name, values in wall.items()}
    found.values["wall_s_per_token"] = wall
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
    for name, goal in (("plain loop", GOAL_PLAIN), ("transformers", GOAL_TRANSFORMERS)):
        for rows in options.batches if name in arms else ():
            found.compare(
                times, of=f"{name}, batch {rows}", to=f"ours, batch {rows}", goal=goal,
                name=f"tokens/s, ours / {name}, batch {rows}",
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


def _per_token(answer: Answering, prompts: list[list[int]], tokens: int, wall: list[float]) -> float:
    """CPU seconds of a token; those of the clock are appended to `wall`."""
    began, cpu = time.perf_counter(), time.process_time()
    answer(prompts)
    made = len(prompts) * tokens
    spent = time.process_time() - cpu
    wall.append((time.perf_counter() - began) / made)
    return spent / made


def measure_length(options: Any, found: BenchMeasurement, say: Say) -> None:
    """Tokens/s at the end of a long answer against those at its begin."""
    module = bench_gpt(options)
    stamps: list[float] = []
    module.register_forward_pre_hook(lambda *_: stamps.append(time.process_time()))
    prompts, sampling = prompts_of(options, 4), Sampling(options.long)
    tenth = max(1, options.long // TENTH)
    say(f"{options.blocks} answers of {options.long} tokens")
    names = f"first tenth of {options.long} tokens", f"last tenth of {options.long} tokens"
    times: dict[str, list[float]] = {name: [] for name in names}
    for block in range(options.blocks + 1):
        stamps.clear()
        answers = generate(module, prompts, sampling=sampling, context=context_of(options))
        if block == 0:
            lengths = {len(answer) for answer in answers}
            found.gate(Check("long answers have all their tokens", lengths == {options.long}, f"{sorted(lengths)}"))
            continue
        first, last = stamps[1 : tenth + 2], stamps[-tenth - 1 :]  # without the pass over the prompts
        for name, part in zip(names, (first, last), strict=True):
            times[name].append((part[-1] - part[0]) / (len(part) - 1) / len(prompts))
    found.arms |= times
    found.compare(times, of=names[0], to=names[1], goal=GOAL_LENGTH,
                  name=f"tokens/s, last / first tenth of {options.long} tokens")  # fmt: skip
