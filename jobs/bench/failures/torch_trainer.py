"""A bare `TorchTrainer` as Ray Train's documentation writes it, which saves and restores: `bench restart`'s other arm.

python -m jobs.bench.failures.torch_trainer SETTINGS.json
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from jobs.bench.failures.restart import note_step


def train_func(settings: dict[str, Any]) -> None:
    """A worker: trains without end, and goes on from Ray Train's latest checkpoint."""
    import ray.train
    import ray.train.torch
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from raytrain.models.gpt import gpt

    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    module = gpt(vocab_size=256, **{key: settings[key] for key in ("layers", "heads", "width", "context")}).module
    model: Any = ray.train.torch.prepare_model(module)
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    text = torch.frombuffer(bytearray(Path(settings["text"]).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // settings["context"] * settings["context"]].view(-1, settings["context"])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), settings["batch"], drop_last=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step, first = 0, ray.train.get_context().get_world_rank() == 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            step = restore(folder, plain, optimizer)
    while True:
        for (ids,) in loader:
            optimizer.zero_grad()
            logits = model(input_ids=ids[:, :-1])["logits"]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if first:
                note_step(step)
            if step % settings["save_every"]:
                continue
            with tempfile.TemporaryDirectory() as folder:
                kept = None
                if first:
                    save(folder, plain, optimizer, step)
                    kept = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"loss": loss.item()}, checkpoint=kept)


def save(folder: str, module: Any, optimizer: Any, step: int) -> None:
    """Write weights, the optimizer's tensors and the step."""
    from safetensors.torch import save_file, save_model

    save_model(module, os.path.join(folder, "model.safetensors"))
    state = optimizer.state_dict()["state"]
    kept = {f"{number}.{name}": value for number, held in state.items() for name, value in held.items()}
    save_file(kept, os.path.join(folder, "optimizer.safetensors"), metadata={"step": str(step)})


def restore(folder: str, module: Any, optimizer: Any) -> int:
    """Read what `save` wrote; returns the step."""
    from safetensors import safe_open
    from safetensors.torch import load_file, load_model

    load_model(module, os.path.join(folder, "model.safetensors"))
    path = os.path.join(folder, "optimizer.safetensors")
    state: dict[int, dict[str, Any]] = {}
    for name, value in load_file(path).items():
        number, _, part = name.partition(".")
        state.setdefault(int(number), {})[part] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()["step"])


def main(path: str) -> None:
    """Train with the settings of a file until the process is ended."""
    import uuid

    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    settings = json.loads(Path(path).read_text())
    trainer = TorchTrainer(
        train_func,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=settings["workers"]),
        run_config=RunConfig(
            name=uuid.uuid4().hex,
            storage_path=settings["storage"],
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main(sys.argv[1])
