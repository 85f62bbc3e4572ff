"""Input of benches: generated training data, and the jobs that train on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from jobs.bench.harness.options import BenchOptions, TextOptions
from raytrain.errors import InputError

MAX_TOKENS = 4_000_000


def job_of(
    options: BenchOptions, model: dict[str, Any], data: Any, *, name: str, loop: dict[str, Any], workers: int = 1,
    threads: int = 1, **sections: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """A job on the CPU that trains on all of its data.

    Args:
        data: the path of a text, or training data for `data.train`.
        loop: keys of the section, over an endless `max_steps`. sections: further sections.
    """
    source = {"source": "text", "path": str(data)} if isinstance(data, Path) else {"train": data}
    return {
        "name": f"bench-{name}",
        "seed": options.seed,
        "model": model,
        "data": {**source, "eval_fraction": 0.0},
        "loop": {"max_steps": 1_000_000, **loop},
        "scale": {"workers": workers, "mode": "cpu", "threads": threads, **sections.pop("scale", {})},
        **sections,
    }


def gpt_model(options: BenchOptions, *, builder: str = "raytrain.models.gpt:gpt", **sizes: int) -> dict[str, Any]:
    """The section `model` of a GPT with the sizes of the options, over four heads."""
    own = options.model_dump(include={"layers", "heads", "width", "context"})
    return {"builder": builder, "heads": 4, **own, **sizes}


def perceptron_model(width: int, *, classes: int) -> dict[str, Any]:
    """The section `model` of a perceptron with three hidden layers."""
    return {"builder": "raytrain.models.mlp:mlp", "hidden": [width] * 3, "num_classes": classes}


def draw_bytes(seed: int) -> bytes:
    """60,000 random letters."""
    draw = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(97, 123, (60_000,), generator=draw, dtype=torch.uint8).tolist())


def draw_rows(rows: int, features: int, *, classes: int, seed: int) -> dict[str, torch.Tensor]:
    """Random features "x", (rows, features), with random "labels"."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, features, generator=draw),
        "labels": torch.randint(classes, (rows,), generator=draw),
    }


def write_text(folder: Path, options: TextOptions, *, steps: int, source: str | None = None) -> Path:
    """Write a text whose windows fill every step of an epoch (the plain loop has no shorter last batch) and return its
    path: random words for `steps` steps, or the beginning of the file `source`.

    Raises:
        InputError: `source` is shorter than one batch of windows.
    """
    batch, context = options.batch, options.context
    if source:
        text = Path(source).read_bytes()
    else:
        draw = np.random.default_rng(options.seed)
        words = [bytes(draw.integers(97, 123, size=draw.integers(2, 9)).astype(np.uint8)) for _ in range(400)]
        tokens = min(steps * batch * context, MAX_TOKENS) + 10_000
        text = b" ".join(words[i] for i in draw.integers(len(words), size=tokens // 3))[:tokens]
    whole_steps = (len(text) // context - 1) // batch
    if not whole_steps:
        raise InputError("text", got=f"{len(text)} bytes", expected="at least one batch of windows")
    path = folder / "text.txt"
    path.write_bytes(text[: context * (whole_steps * batch + 1)])
    return path
