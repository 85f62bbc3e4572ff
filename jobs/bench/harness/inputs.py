"""Input of benches: generated training data, and the jobs that train on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from jobs.bench.harness.options import BenchOptions, TextOptions

MAX_TOKENS = 1_000_000


def job_of(
    options: BenchOptions, model: dict[str, Any], data: Any, *, name: str, loop: dict[str, Any], workers: int = 1,
    threads: int = 1, **sections: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """A job on the CPU that trains on all of its data, which is the path of a text or is given as `data.train`."""
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


def draw_bytes(seed: int, size: int = 60_000) -> bytes:
    draw = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(97, 123, (size,), generator=draw, dtype=torch.uint8).tolist())


def draw_rows(rows: int, features: int, *, classes: int, seed: int) -> dict[str, torch.Tensor]:
    """Random features "x", (rows, features), with random "labels"."""
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, features, generator=draw), "labels": torch.randint(classes, (rows,), generator=draw)}


def write_text(folder: Path, options: TextOptions, *, steps: int) -> Path:
    """Write random letters and return their path. Their windows fill every step of an epoch, which has `steps` steps if
    that is not too long: the plain loop has no shorter last batch."""
    rows = options.batch * max(1, min(steps, MAX_TOKENS // (options.batch * options.context)))
    path = folder / "text.txt"
    path.write_bytes(draw_bytes(options.seed, options.context * (rows + 1)))
    return path
