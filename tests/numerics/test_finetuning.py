"""Models of transformers under the step's rules: the loss over the whole batch, however it is cut and padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folders import make_folder, texts, write_lines
from gang import run_gang
from lab import make_session, train
from torch import Tensor
from tuned import fine_tune

from raytrain.models.huggingface import open_tokenizer
from raytrain.runs.folder import RunFolder

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra `transformers`)")

LM = "raytrain.models.transformers:causal_lm"
TOLERANCE = 1e-12
WIDTH = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 computes in float64 throughout; Llama's norms pass through float32 for any weights. The head is
    tied to the embedding."""
    return make_folder(tmp_path_factory.mktemp("models") / "gpt2", "gpt2")


def section(folder: Path, place: Path, **more: Any) -> dict[str, Any]:
    """Rows of different lengths."""
    path = write_lines(place / "rows.jsonl", texts(48))
    return {"source": "jsonl", "path": str(path), "tokenizer": str(folder), "max_length": 48, "labels": "same",
            "eval_fraction": 0.0, **more}  # fmt: skip


def trained(folder: Path, data: dict[str, Any], *, micro: int) -> tuple[list[float], dict[str, Tensor]]:
    session = make_session(
        {"builder": LM, "path": str(folder)}, data, precision="fp64",
        loop={"global_batch_size": 12, "micro_batch_size": micro, "max_steps": 3},
    )  # fmt: skip
    rows, _ = train(session)
    return rows.losses, dict(session.trainable.module.named_parameters())


@pytest.mark.parametrize("fields", [
    {"text_field": "text"}, {"prompt_field": "prompt", "completion_field": "completion"},
    {"text_field": "text", "packing": "packed"},
])  # fmt: skip
def test_four_ragged_micro_batches_are_one_batch(folder: Path, tmp_path: Path, fields: dict[str, str]) -> None:
    """Each is padded to its own longest row and has its own number of labels; neither shows in loss or weights."""
    data = section(folder, tmp_path, **fields)
    whole, parts = (trained(folder, data, micro=micro) for micro in (12, 3))
    assert whole[0] == pytest.approx(parts[0], rel=0, abs=TOLERANCE)
    for name, weight in whole[1].items():
        one, other = weight, parts[1][name]
        if name.endswith("c_attn.bias"):  # of query, key and value: the key's exact gradient is zero (rule 2)
            one, other = (torch.cat([bias[:WIDTH], bias[2 * WIDTH :]]) for bias in (one, other))
        torch.testing.assert_close(other, one, rtol=0, atol=TOLERANCE)


def test_the_first_loss_is_the_mean_over_every_token_after_a_first(folder: Path, tmp_path: Path) -> None:
    """Document by document, without padding, with transformers' own model and torch's own loss."""
    data = section(folder, tmp_path, text_field="text")
    session = make_session(
        {"builder": LM, "path": str(folder)}, data, precision="fp64",
        loop={"global_batch_size": 48, "micro_batch_size": 8, "max_steps": 1},
    )  # fmt: skip
    (loss,) = train(session)[0].losses
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    total, count = 0.0, 0
    tokenizer = open_tokenizer(str(folder))
    for row in texts(48):
        ids = torch.tensor([[*tokenizer(row["text"]).input_ids, tokenizer.eos_token_id]])
        logits = model(input_ids=ids).logits[0, :-1]
        total += float(F.cross_entropy(logits, ids[0, 1:], reduction="sum").detach())
        count += ids.shape[1] - 1
    assert loss == pytest.approx(total / count, rel=0, abs=TOLERANCE)


def test_packed_and_padded_rows_learn_the_same(folder: Path, tmp_path: Path) -> None:
    """All documents in one step: the same loss and, as documents do not read each other, the same gradients."""
    found = []
    for packing in ("padded", "packed"):
        session = make_session(
            {"builder": LM, "path": str(folder)}, section(folder, tmp_path, text_field="text", packing=packing),
            precision="fp64", loop={"global_batch_size": 48 if packing == "padded" else 15, "max_steps": 1},
        )  # fmt: skip
        (loss,) = train(session)[0].losses
        found.append((loss, float(session.step.gradients.sum_of_squares())))
    assert found[0][0] == pytest.approx(found[1][0], rel=0, abs=TOLERANCE)
    assert found[0][1] == pytest.approx(found[1][1], rel=TOLERANCE)


def test_sharded_and_replicated_models_train_and_export_the_same(folder: Path, tmp_path: Path) -> None:
    """Two workers, a tied head and frozen norms; documents packed."""
    model = {"builder": LM, "path": str(folder), "freeze": ["*.ln_1.*"]}
    data = section(folder, tmp_path, text_field="text", packing="packed")
    losses, held, left = [], [], []
    for strategy in ("data_parallel", "fsdp"):
        run = RunFolder.create(str(tmp_path / strategy), "run")
        told = run_gang(fine_tune, model, data, strategy, run.path, world_size=2, timeout=200.0)
        losses.append(told[0][0])
        held.append(max(one[1] for one in told))
        made, report = transformers.AutoModelForCausalLM.from_pretrained(
            Path(run.weights).parent, output_loading_info=True, dtype=torch.float64
        )
        assert not any(report.values()) and type(made).__name__ == "GPT2LMHeadModel"
        assert made.lm_head.weight is made.transformer.wte.weight
        left.append(made.state_dict())
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=TOLERANCE)
    assert held[1] < 0.6 * held[0]
    for name, tensor in left[0].items():
        if not name.endswith("c_attn.bias"):
            torch.testing.assert_close(left[1][name], tensor, rtol=0, atol=TOLERANCE)
