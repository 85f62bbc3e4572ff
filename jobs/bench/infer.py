"""Bench `infer`: generation in batches, against transformers; a model over two stages.

Generation is compared by CPU seconds of one process, which other programs on the machine disturb less than the clock.
Stages are compared by the clock.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal
from jobs.bench.harness.options import GptOptions, key
from jobs.bench.harness.sessions import restored_threads, timed
from jobs.driver.runtime import connected
from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.infer.generate import Sampling, generate, greedy_answers
from raytrain.infer.input import InputRows
from raytrain.infer.model import InferenceModel
from raytrain.infer.stages.actors import remote_pipeline
from raytrain.infer.stages.partition import plan_stages
from raytrain.infer.stages.split import SplitModule, StageSplit, skeleton_of
from raytrain.infer.stages.stage import parts_of
from raytrain.infer.worker import Work
from raytrain.models.gpt import gpt
from raytrain.models.weights.stored import export_weights
from raytrain.trainable import Trainable

Part = Literal["batches", "stages"]
VOCABULARY = 256  # bytes
#: Tokens/s of a batch of so many rows over those of single rows, and ours over transformers'.
GOALS_BATCHED = {4: Goal(at_least=2.7), 16: Goal(at_least=4.0)}
GOAL_TRANSFORMERS = Goal(at_least=1.0)
#: Seconds of one process with the whole model over those of two stages with all batches in flight; 16 / 9 is possible.
GOAL_STAGES = Goal(at_least=1.3)
STAGES = 2

Answering = Callable[[list[list[int]]], list[list[int]]]


class InferOptions(GptOptions):
    parts: list[Part] = key(["batches", "stages"], "what to measure", quick=["batches"])
    threads: Count | Literal["auto"] = key(1, "threads of the process that generates")
    blocks: Count = key(15, "repetitions of generation that are kept; each runs one block of every arm", quick=2)
    prompt: Count = key(32, "tokens of the longest prompt; the shortest has half of them", quick=6)
    tokens: Count = key(64, "tokens of an answer", quick=4)
    batches: list[Count] = key([1, 4, 16], "rows of a batch", quick=[1, 4])
    stage_blocks: Count = key(7, "repetitions of the batches over stages that are kept", quick=1)
    stage_layers: Count = key(8, "of the GPT over stages", quick=2)
    stage_width: Count = key(256, "of the GPT over stages", quick=16)
    stage_rows: Count = key(8, "rows of a batch over stages", quick=2)
    stage_tokens: Count = key(128, "tokens of a row over stages", quick=8)
    micro_batches: Count = key(8, "batches over stages, all of them in flight in one arm", quick=2)


def run(options: InferOptions, found: BenchMeasurement) -> None:
    found.block = "CPU seconds of a token, for stages seconds of all batches"
    if "batches" in options.parts:
        with restored_threads(options.thread_count):
            _measure_batches(options, found)
    if "stages" in options.parts:
        _measure_stages(options, found)


def seeded_gpt(*, layers: int, heads: int, width: int, context: int, vocab_size: int, seed: int) -> Trainable:
    """A GPT with random weights that are the same in every process."""
    torch.manual_seed(seed)
    return gpt(layers=layers, heads=heads, width=width, context=context, vocab_size=vocab_size)


# ---------------------------------------------------------------- batches


def _measure_batches(options: InferOptions, found: BenchMeasurement) -> None:
    """Tokens/s of our generation in batches, against single rows and transformers."""
    sampling, context = Sampling(options.tokens), options.prompt + options.tokens
    made = seeded_gpt(**{**options.sizes, "context": context}, vocab_size=VOCABULARY, seed=options.seed)
    module = made.module.eval().requires_grad_(False)
    arms: dict[str, Answering] = {"ours": partial(generate, module, sampling=sampling, context=context)}
    if importlib.util.find_spec("transformers") is None:
        found.cannot("as fast as transformers' generate", "transformers is not installed")
    else:
        copy = transformers_gpt2(module)
        arms["transformers"] = lambda prompts: greedy_answers(copy, None, prompts, sampling=sampling, numbers=())
    prompts = prompts_of(options, max(options.batches))
    single_rows = [arms["ours"]([prompt])[0] for prompt in prompts]
    for name, answer in arms.items():
        wrong = sum(a != b for a, b in zip(answer(prompts), single_rows, strict=True))
        detail = f"{len(prompts) - wrong} of {len(prompts)} answers are equal"
        found.gate(Check(f"{name}, in a batch: the tokens of single rows", not wrong, detail))
    if not found.passed:
        return

    def block(answer: Answering, prompts: list[list[int]]) -> float:
        began = time.process_time()
        answer(prompts)
        return (time.process_time() - began) / (len(prompts) * options.tokens)

    blocks = {
        f"{name}, batch {rows}": partial(block, answer, prompts_of(options, rows))
        for rows in options.batches
        for name, answer in arms.items()
    }
    found.say(f"{options.blocks} blocks of {len(blocks)} arms, {options.tokens} tokens a row")
    times = found.alternate(blocks, blocks=options.blocks)
    found.values["tokens_per_s"] = {name: 1 / statistics.median(values) for name, values in times.items()}
    single, *larger = sorted(options.batches)
    for rows in larger:
        label, goal = f"tokens/s, batch {rows} / batch {single}", GOALS_BATCHED.get(rows)
        found.compare(times, of=f"ours, batch {single}", to=f"ours, batch {rows}", name=label, goal=goal)
    for rows in options.batches if "transformers" in arms else ():
        label, other = f"tokens/s, ours / transformers, batch {rows}", f"transformers, batch {rows}"
        found.compare(times, of=other, to=f"ours, batch {rows}", name=label, goal=GOAL_TRANSFORMERS)


def prompts_of(options: InferOptions, rows: int) -> list[list[int]]:
    """Random prompts of half to the full length; a batch of several sizes needs its padding."""
    draw = torch.Generator().manual_seed(options.seed)
    lengths = torch.randint(max(1, options.prompt // 2), options.prompt + 1, (rows,), generator=draw).tolist()
    return [torch.randint(VOCABULARY, (length,), generator=draw).tolist() for length in lengths]


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


# ---------------------------------------------------------------- stages


def _measure_stages(options: InferOptions, found: BenchMeasurement) -> None:
    """Seconds of the same batches through the whole model, and over two stages with one or all of them in flight."""
    draw = torch.Generator().manual_seed(options.seed)
    shape = (options.stage_rows, options.stage_tokens)
    batches = [torch.randint(VOCABULARY, shape, generator=draw) for _ in range(options.micro_batches)]
    outputs: dict[str, list[Tensor]] = {}
    found.say("stages: starting Ray")
    with (
        TemporaryDirectory(prefix="bench-infer-") as folder,
        connected("local", num_cpus=STAGES + 1, num_gpus=0, verbose=False),
        ThreadPoolExecutor(len(batches)) as pool,
        restored_threads(1),
        torch.inference_mode(),
    ):
        sizes = {"layers": options.stage_layers, "heads": options.heads, "width": options.stage_width,
                 "context": options.stage_tokens, "vocab_size": VOCABULARY}  # fmt: skip
        whole = seeded_gpt(**sizes, seed=options.seed).module.eval()
        weights = f"{folder}/model.safetensors"
        export_weights(whole.state_dict(), weights)
        keys = {"builder": "raytrain.models.gpt:gpt", "init_from": weights, **sizes}
        model = InferenceModel(ModelConfig.model_validate(keys))
        split = StageSplit(plan_stages(parts_of(skeleton_of(model)), STAGES), len(batches))
        work = Work(model, InferConfig(), InputRows.at([]), folder, 1, 0, 1, split=split)
        pipeline = remote_pipeline(work, cpus=1, gpus=0)
        staged = SplitModule(skeleton_of(model).module, pipeline, inflight=len(batches))
        whole_model, one, every = "whole model", "two stages, 1 in flight", f"two stages, {len(batches)} in flight"
        ways = {
            whole_model: lambda: [_logits(whole, batch) for batch in batches],
            one: lambda: [_logits(staged, batch) for batch in batches],
            every: lambda: list(pool.map(partial(_logits, staged), batches)),
        }

        def block(name: str) -> float:
            return timed(lambda: outputs.update({name: ways[name]()}))

        found.say(f"stages: {options.stage_blocks} times {len(ways)} arms of {len(batches)} batches")
        times = found.alternate({name: partial(block, name) for name in ways}, blocks=options.stage_blocks)
        pipeline.close()
    pairs = [pair for name in (one, every) for pair in zip(outputs[whole_model], outputs[name], strict=True)]
    equal = all(torch.equal(expected, other) for expected, other in pairs)
    label, detail = "stages: the outputs of the whole model, bit for bit", f"{len(batches)} batches of {shape}"
    found.gate(Check(label, equal, detail))
    for name, goal in ((one, None), (every, GOAL_STAGES)):
        label = f"seconds, whole model in one process / {name}"
        found.compare(times, of=whole_model, to=name, name=label, goal=goal)


def _logits(module: nn.Module, batch: Tensor) -> Tensor:
    return module(input_ids=batch)["logits"]
