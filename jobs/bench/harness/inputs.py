"""Input that benches generate: a text to train on, and load traces of experts.

A load trace says how many rows each expert got, interval by interval. In a JSONL file one line is one interval:
{"step": its last step, "layers": [[rows of each expert], ...]}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from raytrain.errors import InputError

MAX_TOKENS = 4_000_000


def write_text(folder: Path, *, batch: int, context: int, steps: int, seed: int, source: str | None = None) -> Path:
    """Write a text whose windows fill every step of an epoch (the plain loop has no shorter last batch) and return its
    path: drawn words for `steps` steps, or what fits of the file `source`.

    Raises:
        InputError: `source` is shorter than one batch of windows.
    """
    if source:
        text = Path(source).read_bytes()
    else:
        draw = np.random.default_rng(seed)
        words = [bytes(draw.integers(97, 123, size=draw.integers(2, 9)).astype(np.uint8)) for _ in range(400)]
        tokens = min(steps * batch * context, MAX_TOKENS) + 10_000
        text = b" ".join(words[i] for i in draw.integers(len(words), size=tokens // 3))[:tokens]
    whole_steps = (len(text) // context - 1) // batch
    if not whole_steps:
        raise InputError("text", seen=f"{len(text)} bytes", expected="at least one batch of windows")
    path = folder / "text.txt"
    path.write_bytes(text[: context * (whole_steps * batch + 1)])
    return path


Loads = list[list[float]]
"""[layer][expert]: rows in one interval."""


def read_trace(path: str) -> list[Loads]:
    """The intervals of a trace in their order.

    Raises:
        InputError: no such file, a line that is not an interval, intervals of different shapes, fewer than two.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "trace", seen=f"{path} ({error})", expected="a JSONL file with one interval per line"
        ) from error
    trace = [_read_interval(line, origin=f"{path} line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if len(trace) < 2:
        raise InputError("trace", seen=f"{path} with {len(trace)} intervals", expected="at least two")
    shape = [len(row) for row in trace[0]]
    for n, loads in enumerate(trace, 1):
        if [len(row) for row in loads] != shape:
            raise InputError(
                "trace", seen=f"{path} interval {n} of another shape", expected=f"experts by layer {shape}"
            )
    return trace


def _read_interval(line: str, *, origin: str) -> Loads:
    try:
        row: Any = json.loads(line)
        loads = [[float(count) for count in layer] for layer in row["layers"]]
    except (ValueError, TypeError, KeyError) as error:
        expected = '{"step": n, "layers": [[rows of each expert], ...]}'
        raise InputError("trace", seen=f"{origin}: {line[:60]}", expected=expected) from error
    if not loads or not all(layer and min(layer) >= 0 and sum(layer) < float("inf") for layer in loads):
        raise InputError("trace", seen=f"{origin}: {line[:60]}", expected="layers of non-negative counts")
    return loads


def draw_trace(
    *, intervals: int, layers: int, experts: int, sigma: float, drift: float, rows: int, seed: int
) -> list[Loads]:
    """Lognormal loads of spread `sigma`, sampled as `rows` per layer. Their logarithms do a random walk with step
    `drift` per interval that is pulled back to its mean, so that the spread stays."""
    draw = np.random.default_rng(seed)
    logs = draw.normal(0.0, sigma, (layers, experts))
    stays = max(0.0, 1 - (drift / sigma) ** 2) ** 0.5 if sigma > 0 else 0.0
    trace = []
    for _ in range(intervals):
        shares = np.exp(logs)
        shares /= shares.sum(-1, keepdims=True)
        trace.append([[float(count) for count in draw.multinomial(rows, row)] for row in shares])
        logs = stays * logs + draw.normal(0.0, drift, logs.shape)
    return trace
