"""What runs in the commands of bench `startup`: the observer of our run, the example of Ray Train's documentation, a
bare `TorchTrainer`, and a script without Ray. Each notes the time at the end of its first step.

It imports little, so that no command is charged for the bench.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

#: Environment variable: the file in which `FirstStep` notes the time.
NOTE = "RAYTRAIN_BENCH_FIRST_STEP"


class FirstStep:
    def metrics(self, row: dict[str, Any]) -> None:
        note = Path(os.environ[NOTE])
        if row["kind"] == "train" and not note.exists():
            note.write_text(repr(time.time()))


def train_script(settings: dict[str, Any], rank: int) -> None:
    rows = settings["batch"] * settings["workers"]
    _step(settings, prepared=lambda model: model, ids_of=lambda text: text[:rows])
    Path(settings["note"]).write_text(repr(time.time()))


def train_with_ray(settings: dict[str, Any], rank: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        _worker,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=settings["workers"]),
        run_config=RunConfig(storage_path=settings["storage"]),
    )
    trainer.fit()


def _worker(settings: dict[str, Any]) -> None:
    import ray.train.torch
    import torch

    def first_batch(rows: Any) -> Any:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=settings["batch"])
        (ids,) = next(iter(ray.train.torch.prepare_data_loader(loader)))
        return ids

    loss = _step(settings, prepared=ray.train.torch.prepare_model, ids_of=first_batch)
    if ray.train.get_context().get_world_rank() == 0:
        Path(settings["note"]).write_text(repr(time.time()))
    ray.train.report({"loss": loss})


def _step(settings: dict[str, Any], *, prepared: Any, ids_of: Any) -> float:
    import torch

    from raytrain.models.gpt import gpt

    torch.set_num_threads(settings["threads"])
    sizes = {key: settings[key] for key in ("layers", "heads", "width", "context")}
    model = prepared(gpt(vocab_size=256, **sizes).module)
    text = torch.frombuffer(bytearray(Path(settings["text"]).read_bytes()), dtype=torch.uint8).long()
    ids = ids_of(text[: len(text) // settings["context"] * settings["context"]].view(-1, settings["context"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    logits = model(input_ids=ids[:, :-1])["logits"]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()
