"""The README's lines about models of Hugging Face, run as they stand, on two workers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import make_folder, texts, write_lines
from lab import make_session, train

from jobs.job.facts import resolved
from jobs.job.spec import load_spec

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("transformers", reason="transformers is not installed (the extra `transformers`)")

FLAGS = ("precision.dtype=fp64", "loop.log_every=1", "loop.max_steps=3", "scale.mode=cpu", "scale.threads=1")


def lines_of(kind: str) -> str:
    section = (ROOT / "jobs/README.md").read_text().partition("\n## Hugging Face models")[2].partition("\n## ")[0]
    (found,) = re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)
    return found


@pytest.mark.timeout(300)
@pytest.mark.covers("FUT-12")
def test_two_workers_fine_tune_a_tied_llama_as_one_does_and_transformers_loads_it(
    train_shared: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chat.yaml").write_text(lines_of("yaml"))
    make_folder(tmp_path / "models" / "llama", "llama")
    write_lines(tmp_path / "chat.jsonl", texts(120))
    job = tmp_path / "chat.yaml"
    flags = (*FLAGS, "data.max_length=20")
    run = train_shared(job, *flags, "scale.workers=2", timeout=240)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == 3 and "accuracy" in rows[-1] and rows[-1]["kind"] == "eval"
    plan = json.loads((run / "plan.json").read_text())
    assert plan["choices"]["workers"]["value"] == 2 and "packed into" in plan["data_facts"]["reason"]

    monkeypatch.chdir(tmp_path)
    spec = resolved(load_spec(job, flags).spec)
    session = make_session(
        {"builder": spec.model.builder, **spec.model.keys}, {"source": spec.data.source, **spec.data.keys},
        precision="fp64", loop={"max_steps": 3, "epochs": 1}, optim={"lr": 2e-4},
    )  # fmt: skip
    alone, _ = train(session)
    assert alone.losses == pytest.approx(losses, rel=1e-6), "Llama's norms compute in float32"

    scope: dict[str, Any] = {}
    exec(lines_of("python"), scope)  # the README's own
    model, tokenizer = scope["model"], scope["tokenizer"]
    assert model.lm_head.weight is model.model.embed_tokens.weight and tokenizer("the rain").input_ids
    ours = session.trainable.module.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, ours[name], rtol=0, atol=1e-6)
