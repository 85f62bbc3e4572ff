"""Load traces: how many rows each expert got, window by window; read from JSONL, or drawn with drift.

One line is one window: {"step": last step of the window, "layers": [[rows of each expert], ...]}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from raytrain.errors import InputError

Window = list[list[float]]
"""[layer][expert]: rows."""


def read_trace(path: str) -> list[Window]:
    """The windows of a trace in their order.

    Raises:
        InputError: no such file, a line that is no window, windows of different shapes, fewer than two.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("trace", seen=f"{path} ({error})", expected="a JSONL file of windows") from error
    windows = [_window(line, origin=f"{path} line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if len(windows) < 2:
        raise InputError("trace", seen=f"{path} with {len(windows)} windows", expected="two at least")
    shape = [len(row) for row in windows[0]]
    for n, window in enumerate(windows, 1):
        if [len(row) for row in window] != shape:
            raise InputError("trace", seen=f"{path} window {n} of another shape", expected=f"experts by layer {shape}")
    return windows


def _window(line: str, *, origin: str) -> Window:
    try:
        row: Any = json.loads(line)
        window = [[float(count) for count in layer] for layer in row["layers"]]
    except (ValueError, TypeError, KeyError) as error:
        expected = '{"step": n, "layers": [[rows of each expert], ...]}'
        raise InputError("trace", seen=f"{origin}: {line[:60]}", expected=expected) from error
    if not window or not all(layer and min(layer) >= 0 and sum(layer) < float("inf") for layer in window):
        raise InputError("trace", seen=f"{origin}: {line[:60]}", expected="layers of counts that are not negative")
    return window


def draw_trace(
    *, windows: int, layers: int, experts: int, sigma: float, drift: float, rows: int, seed: int
) -> list[Window]:
    """Lognormal loads of spread `sigma` whose logarithms walk by `drift` a window, sampled as `rows` a layer.

    The walk pulls back to its mean, so that the spread stays.
    """
    draw = np.random.default_rng(seed)
    logs = draw.normal(0.0, sigma, (layers, experts))
    stays = max(0.0, 1 - (drift / sigma) ** 2) ** 0.5 if sigma > 0 else 0.0
    found = []
    for _ in range(windows):
        shares = np.exp(logs)
        shares /= shares.sum(-1, keepdims=True)
        found.append([[float(count) for count in draw.multinomial(rows, row)] for row in shares])
        logs = stays * logs + draw.normal(0.0, drift, logs.shape)
    return found
