"""The example of Ray Train's documentation that `bench startup` compares with: a bare `TorchTrainer`.

python -m jobs.bench.startup_trainer SETTINGS.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def train_func(settings: dict[str, Any]) -> None:
    """A worker: one epoch of one step, and the time at its end."""
    import ray.train.torch
    import torch

    from raytrain.models.gpt import gpt

    torch.set_num_threads(settings["threads"])
    sizes = {key: settings[key] for key in ("layers", "heads", "width", "context")}
    module = gpt(vocab_size=256, **sizes).module
    model = ray.train.torch.prepare_model(module)
    text = torch.frombuffer(bytearray(Path(settings["text"]).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // settings["context"] * settings["context"]].view(-1, settings["context"])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=settings["batch"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (ids,) = next(iter(ray.train.torch.prepare_data_loader(loader)))
    logits = model(input_ids=ids[:, :-1])["logits"]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if ray.train.get_context().get_world_rank() == 0:
        Path(settings["note"]).write_text(repr(time.time()))
    ray.train.report({"loss": loss.item()})


def main(path: str) -> None:
    """Train with the settings of a file."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    settings = json.loads(Path(path).read_text())
    trainer = TorchTrainer(
        train_func,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=settings["workers"]),
        run_config=RunConfig(storage_path=settings["storage"]),
    )
    trainer.fit()


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main(sys.argv[1])
