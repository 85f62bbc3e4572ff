"""Text from a language model, a batch of prompts at a time: raytrain's models, or a transformers model's own code.

Predictors call it; `raytrain.execution.export` writes a run's sample with it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.errors import first_line
from raytrain.models.attention import KeyValueCache
from raytrain.train.memory.device import is_out_of_memory
from raytrain.trainable import IGNORED_LABEL, MASK, in_eval

# ---------------------------------------------------------------- generate


SAMPLE_TEMPERATURE = 0.8
SAMPLE_TOP_K = 50
SAMPLE_PROMPT = 32

#: Where a read waits for the device and passes are captured as CUDA graphs: tokens of a row that are read at once.
BLOCKS = {"cuda": 16}
#: Ended rows are computed on up to this share of a batch: to drop them copies the caches of all others.
ENDED = 0.25
#: Fewer passes are over sooner than a graph is made, which takes three.
LEAST_PASSES = 16
#: Modules whose pass cannot be captured: it reads the device, for example.
REFUSED: WeakSet[nn.Module] = WeakSet()
#: The last graph of each device, which is not replayed any more when the next one takes its memory over: with a pool
#: for each, ten graphs of a small GPT left 0.3 GB reserved on an H200.
_LAST: dict[torch.device, torch.cuda.CUDAGraph] = {}

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int  # most tokens of an answer
    temperature: float = 0.0  # 0 takes the most likely token
    top_k: int | None = None  # draw from the k most likely tokens; None for all
    # draw from the most likely tokens that together have at least this probability; None for all
    top_p: float | None = None
    end_ids: frozenset[int] = frozenset()  # tokens that end an answer; they are not part of it
    stop: tuple[str, ...] = ()  # texts that end an answer; the answer ends before the first of them
    seed: int = 0  # with the row's number, it decides all draws: they do not depend on the batch or the worker


@dataclass
class _Row:
    number: int
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    ended: bool = False


@torch.no_grad()
def generate(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    rows: Sequence[int] | None = None,
    context: int | None = None,
    decode: Decode | None = None,
) -> list[list[int]]:
    """Continue every prompt; the answers do not depend on which other prompts are in the batch, up to rounding.

    Modules whose `takes_cache` is true compute one token a pass, until a row is as long as the context. All others, and
    from there on, read the last `context` tokens again for each new one. Returns the new tokens of each row. The train
    mode of every submodule is restored, and no global generator is advanced. Raises ValueError: an empty prompt, or
    `stop` without `decode`.

    Args:
        module: `forward(input_ids=(B, S))` returns {"logits": (B, S, V)} or an object with `.logits`; it must be
            causal. A forward that names `attention_mask` gets it.
        prompts: tokens, at least one each.
        rows: numbers of the rows, for the draws; by default 0, 1, ...
        context: most tokens that the model sees; None = no limit.
        decode: tokens to text; needed for `sampling.stop`.
    """
    if not all(prompts):
        raise ValueError("a prompt is empty; give at least one token")
    if sampling.stop and decode is None:
        raise ValueError("stop texts need a function that decodes tokens")
    numbers = range(len(prompts)) if rows is None else rows
    every = [_Row(number, list(prompt)) for number, prompt in zip(numbers, prompts, strict=True)]
    with in_eval(module):
        _Batch(module, every, sampling, context, decode).run()
    return [row.answer for row in every]


class _Batch:
    """The rows of a batch that have not ended, and what produces their next tokens."""

    def __init__(
        self, module: nn.Module, rows: list[_Row], sampling: Sampling, context: int | None, decode: Decode | None
    ) -> None:
        self.module, self.sampling, self.context, self.decode = module, sampling, context, decode
        self.device = next(module.parameters()).device
        self.rows = list(rows)  # of the batch; ended ones leave it together
        # (B, N) float64: the draws of each row, a pure function of the seed and the row's number; None if greedy
        self.uniforms_BN: Tensor | None = None
        if sampling.temperature:
            keys = [[sampling.seed % 2**64, row.number % 2**64] for row in rows]
            draws = [np.random.Generator(np.random.Philox(key=key)).random(sampling.max_new_tokens) for key in keys]
            self.uniforms_BN = torch.from_numpy(np.stack(draws)).to(self.device)
        self.masked = MASK in inspect.signature(module.forward).parameters
        self.step = 0

    def run(self) -> None:
        if getattr(self.module, "takes_cache", False):
            self._cached()
        while self._keep(0) != [] and self.step < self.sampling.max_new_tokens:
            given = [row.prompt + row.answer for row in self.rows]
            windows = given if self.context is None else [ids[-self.context :] for ids in given]
            self._append([self._choose(self._forward(windows, None))])

    def _cached(self) -> None:
        longest = max(len(row.prompt) for row in self.rows)
        room = self.sampling.max_new_tokens
        if self.context is not None:
            room = min(room, self.context - longest + 1)
        if room < 1:
            return
        static = self.device.type in BLOCKS and room > LEAST_PASSES and self.module not in REFUSED
        own = partial(KeyValueCache, static=static)
        new_cache: Callable[..., Any] = getattr(self.module, "new_cache", own)  # of a model over stages
        cache = new_cache([len(row.prompt) for row in self.rows], capacity=longest + room - 1)
        logits_BV = self._forward([row.prompt for row in self.rows], cache)
        passes = _OneTokenPasses(self.module, cache)
        block: list[Tensor] = []  # tokens that the host has not seen
        for left in reversed(range(room)):
            block.append(self._choose(logits_BV))
            tokens_B = block[-1]
            if not left or len(block) == BLOCKS.get(self.device.type, 1):
                self._append(block)
                block, kept = [], self._keep(ENDED)
                if not left or kept == []:
                    return
                if kept is not None:
                    cache.keep(kept)
                    tokens_B = tokens_B[kept]
            logits_BV = passes(tokens_B, left=left)

    def _forward(self, given: list[list[int]], cache: Any | None) -> Tensor:
        """(B, V) logits of each row's next token."""
        lengths = [len(ids) for ids in given]
        padded = torch.zeros(len(given), max(lengths), dtype=torch.int64)
        for row, ids in enumerate(given):
            padded[row, : len(ids)] = torch.tensor(ids)
        inputs: dict[str, Any] = {"input_ids": padded.to(self.device)}
        uneven = min(lengths) < max(lengths)
        if self.masked and uneven:
            mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
            inputs[MASK] = mask.to(torch.int64).to(self.device)
        if cache is not None:
            inputs["cache"] = cache
        logits = _logits(self.module(**inputs))
        if logits.shape[1] > 1:
            last = torch.tensor(lengths, device=logits.device) - 1
            logits = logits[torch.arange(len(given), device=logits.device), last]
        return logits.reshape(len(given), -1)

    def _choose(self, logits_BV: Tensor) -> Tensor:
        """(B,): each row's next token, on the model's device."""
        self.step += 1
        if self.uniforms_BN is None:
            return logits_BV.argmax(-1)
        return choose(logits_BV, self.sampling, self.uniforms_BN[:, self.step - 1])

    def _append(self, block: list[Tensor]) -> None:
        """Read the tokens of some passes, and give them to the rows that they do not end."""
        for row, tokens in zip(self.rows, torch.stack(block, 1).tolist(), strict=True):
            for token in tokens:
                row.ended = row.ended or token in self.sampling.end_ids
                if row.ended:
                    break
                row.answer.append(token)
                if self.sampling.stop:
                    assert self.decode is not None
                    text = self.decode(row.answer)
                    row.ended = any(stop in text for stop in self.sampling.stop)

    def _keep(self, share: float) -> list[int] | None:
        """Drop the rows that have ended, if they are more than this share or all; returns the places of the others, if
        rows were dropped."""
        kept = [place for place, row in enumerate(self.rows) if not row.ended]
        if kept and len(self.rows) - len(kept) <= share * len(self.rows):
            return None
        self.rows = [self.rows[place] for place in kept]
        if self.uniforms_BN is not None:
            self.uniforms_BN = self.uniforms_BN[kept]
        return kept


class _OneTokenPasses:
    """Calls a module with each row's last token: with a static cache through a graph, one launch instead of hundreds.
    It is made again when the cache has fewer rows or a longer span."""

    def __init__(self, module: nn.Module, cache: Any) -> None:
        self.module, self.cache = module, cache
        self._shape: tuple[int, int | None] | None = None

    def __call__(self, tokens_B: Tensor, *, left: int) -> Tensor:
        """(B, V) logits, which the next call may overwrite; at most `left` passes follow, this one included."""
        shape = (len(tokens_B), getattr(self.cache, "span", None))
        if shape != self._shape:
            self._shape, self._tokens_B, self._replay = shape, tokens_B.clone(), None
            if shape[1] is not None and left >= LEAST_PASSES and self.module not in REFUSED:
                self._record()
        if self._replay is None:
            return self._run(tokens_B)
        self._tokens_B.copy_(tokens_B)
        self._replay()
        self.cache.advance()
        return self._logits_BV

    def _record(self) -> None:
        try:
            self._replay, self._logits_BV = record(self._uncounted, self._tokens_B.device)
        except RuntimeError as error:
            if is_out_of_memory(error, device=self._tokens_B.device):
                raise
            REFUSED.add(self.module)
            print(f"passes of one token are not captured: {first_line(error)}", file=sys.stderr)

    def _uncounted(self) -> Tensor:
        """A pass that can be made again: it would write the same column."""
        self.cache.counts = False
        try:
            return self._run(self._tokens_B)
        finally:
            self.cache.counts = True

    def _run(self, tokens_B: Tensor) -> Tensor:
        return _logits(self.module(input_ids=tokens_B.unsqueeze(1), cache=self.cache))[:, -1]


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures of a device: cuBLAS keeps a workspace for each stream, 32 MiB on an H200."""
    return torch.cuda.Stream(device)


def record(run: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], Any], Tensor]:
    """Capture what a function does on a CUDA device; returns what does it again, and its output. Raises
    RuntimeError: it waits for the device, or cannot be captured."""
    stream, graph = _capture_stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # compiles, compares and allocates what only the first pass does
        with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")  # tells of a read before it spoils a capture
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    last = _LAST.get(device)
    pool = None if last is None else last.pool()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        output = run()
    _LAST[device] = graph
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay, output


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    found = [at for at in (text.find(one) for one in stop) if at >= 0]
    return text[: min(found)] if found else text


def choose(logits_BV: Tensor, sampling: Sampling, uniforms_B: Tensor) -> Tensor:
    """The next token of each row, (B,). Of equally likely tokens the lower numbers come first, also in the top k.
    `logits_BV`: any format; tokens are ordered by it in float32. `uniforms_B`: float64 in [0, 1), one draw for each
    row."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    V = logits_BV.shape[1]
    bits = (logits_BV.float() + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # as large as its number is
    keys = (ordered << 32) + torch.arange(V - 1, -1, -1, device=bits.device)  # no two are equal
    tokens = V - 1 - (keys.topk(min(sampling.top_k or V, V)).values & 0xFFFFFFFF)
    ordered = torch.softmax(logits_BV.gather(1, tokens).double() / sampling.temperature, dim=-1)
    total = ordered.cumsum(-1)
    if sampling.top_p is not None:
        ordered = ordered.masked_fill(total - ordered >= sampling.top_p, 0.0)
        total = ordered.cumsum(-1)
    drawn = (uniforms_B.to(total.device) * total[:, -1]).unsqueeze(1)
    place = torch.searchsorted(total, drawn, right=True).clamp(max=total.shape[1] - 1)
    place = torch.minimum(place, (ordered > 0).sum(-1, keepdim=True) - 1)
    return tokens.gather(1, place).squeeze(1)


def _logits(output: Any) -> Tensor:
    return output["logits"] if isinstance(output, dict) else output.logits


def language_sample(
    module: nn.Module, source: Any, *, context: int | None, tokens: int = 400, seed: int = 0
) -> dict[str, Any] | None:
    """{"prompt", "text", "temperature"}: a language model's continuation of the start of its eval text, or of a prompt,
    with what `raytrain infer` puts in front of it. Returns None if the module gives no logits for
    `forward(input_ids=...)` alone."""
    split = source.eval or source.train
    batch = split.gather(split.eval_order()[:1])
    row, room = batch["input_ids"][0].tolist(), min(SAMPLE_PROMPT, context or SAMPLE_PROMPT)
    learned = (batch["labels"][0] != IGNORED_LABEL).nonzero().flatten().tolist()[:1]
    given = learned[0] + (not source.first_labels_ignored) if learned else 0  # more than one token: a prompt
    front = source.encode("")
    prompt = row[:given] if given > 1 else row
    prompt = (prompt if prompt[: len(front)] == front else front + prompt)[:room]
    sampling = Sampling(tokens, temperature=SAMPLE_TEMPERATURE, top_k=SAMPLE_TOP_K, seed=seed)
    try:
        ids = generate(module, [prompt], sampling=sampling, context=context or SAMPLE_PROMPT)[0]
    except (TypeError, AttributeError, KeyError):  # a user's forward that needs labels, or returns no logits
        return None
    return {"prompt": source.decode(prompt), "text": source.decode(ids), "temperature": SAMPLE_TEMPERATURE}


# ---------------------------------------------------------------- transformers


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
    def __init__(self, codec: Any, stop: Sequence[str], begin: int) -> None:
        self._codec, self._stop, self._begin = codec, stop, begin

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        texts = [self._codec.decode(row) for row in input_ids[:, self._begin :].tolist()]
        done = [any(stop in text for stop in self._stop) for text in texts]
        return torch.tensor(done, device=input_ids.device)
