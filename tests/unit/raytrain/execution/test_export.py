"""What exported weights say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import GPT, Rows, make_session

from raytrain.checkpoint.weights import read_weights
from raytrain.execution.checkpointer import CheckpointSaver
from raytrain.execution.export import EARLIER_TOKENS, export, notes_of
from raytrain.infer.generate import language_sample
from raytrain.runs.folder import RunFolder
from raytrain.train.build import load_module
from raytrain.train.clock import Clock
from raytrain.train.state import LoopState


@pytest.mark.parametrize(
    ("step", "loss", "kind"),
    [(4, "0.25", "eval"), (8, "0.75", "eval"), (9, "0.5", "train")],
    ids=["the best evaluation", "the last evaluation", "a step without one"],
)
def test_weights_carry_the_loss_of_their_own_step(step: int, loss: str, kind: str) -> None:
    state = LoopState(step=9, best_eval_loss=0.25, best_step=4, last_eval={"step": 8, "loss": 0.75}, final_loss=0.5)
    assert notes_of(state, step=step) == {"step": str(step), "loss": loss, "loss_kind": kind}


@pytest.mark.parametrize("most", [50_000_000, 10])
def test_the_kept_checkpoints_write_a_sample_too_unless_the_model_is_large(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("raytrain.execution.export.EARLIER_PARAMETERS", most)
    monkeypatch.setattr("raytrain.execution.export.EARLIER_S", 1e6)
    model = {name: value for name, value in GPT.items() if name != "vocab_size"}
    session = make_session(model, {"source": "text", "path": str(tiny_text)}, loop={"max_steps": 12})
    run, rows = RunFolder(str(tmp_path / "run")), Rows()
    saver = CheckpointSaver(
        session, run, every=4, keep=2, asynchronous=False, reporter=rows, clock=Clock(), fence=lambda: None
    )
    session.loop(reporter=rows, saver=saver, should_stop=lambda: False, clock=saver.clock).run(session.state)
    saver.close()
    module = session.full_module()
    assert module is not None
    export(session, module, run)
    sample = run.read_json(run.sample)
    assert sample["step"] == 12 and len(sample["text"]) > 10
    if most == 10:
        assert sample["earlier"] == []
        return
    assert [row["step"] for row in sample["earlier"]] == [8], "the checkpoints that are kept, without the exported one"
    load_module(module, read_weights(run.checkpoint_dir(8)).tensors)
    again = language_sample(module, session.source, context=model["context"], tokens=EARLIER_TOKENS)
    assert again is not None and again["text"] == sample["earlier"][0]["text"] != sample["text"][:EARLIER_TOKENS]
