"""A training script without Ray, which `bench startup` compares with.

python -m jobs.bench.startup_script SETTINGS.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(path: str) -> None:
    """Take one step with the settings of a file, and note the time at its end."""
    import torch

    from raytrain.models.gpt import gpt

    settings = json.loads(Path(path).read_text())
    torch.set_num_threads(settings["threads"])
    sizes = {key: settings[key] for key in ("layers", "heads", "width", "context")}
    model = gpt(vocab_size=256, **sizes).module
    text = torch.frombuffer(bytearray(Path(settings["text"]).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // settings["context"] * settings["context"]].view(-1, settings["context"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = rows[: settings["batch"] * settings["workers"]]
    logits = model(input_ids=ids[:, :-1])["logits"]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    Path(settings["note"]).write_text(repr(time.time()))


if __name__ == "__main__":
    main(sys.argv[1])
