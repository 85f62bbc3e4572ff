"""What exported weights say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import GPT, Rows, make_session

from raytrain.execution.export import export, notes_of
from raytrain.infer.generate import language_sample
from raytrain.runs.folder import RunFolder
from raytrain.train.state import LoopState


@pytest.mark.parametrize(
    ("step", "loss", "kind"),
    [(4, "0.25", "eval"), (8, "0.75", "eval"), (9, "0.5", "train")],
    ids=["the best evaluation", "the last evaluation", "a step without one"],
)
def test_weights_carry_the_loss_of_their_own_step(step: int, loss: str, kind: str) -> None:
    state = LoopState(step=9, best_eval_loss=0.25, best_step=4, last_eval={"step": 8, "loss": 0.75}, final_loss=0.5)
    assert notes_of(state, step=step) == {"step": str(step), "loss": loss, "loss_kind": kind}


def test_the_sample_is_of_the_exported_weights(tiny_text: Path, tmp_path: Path) -> None:
    model = {name: value for name, value in GPT.items() if name != "vocab_size"}
    session = make_session(model, {"source": "text", "path": str(tiny_text)}, loop={"max_steps": 12})
    run, rows = RunFolder(str(tmp_path / "run")), Rows()
    session.loop(reporter=rows, should_stop=lambda: False).run(session.state)
    module = session.full_module()
    assert module is not None
    export(session, module, run)
    sample = run.read_json(run.sample)
    again = language_sample(module, session.source, context=model["context"])
    assert sample["step"] == 12 and len(sample["text"]) > 10
    assert again is not None and again["text"] == sample["text"]
