"""Weights in int8: a quarter of the bytes, answers that stay the same, and what is left as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from pyarrow import parquet
from torch import Tensor, nn

from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.data.sources.tables import ColumnChoice
from raytrain.errors import InputError
from raytrain.infer import model as loading
from raytrain.infer.model import InferenceModel
from raytrain.infer.predictor import RowPredictor
from raytrain.infer.quantize import Int8Linear, quantization_of, quantize, quantize_compared, same_answer
from raytrain.models.cnn import cnn
from raytrain.models.gpt import Head, gpt
from raytrain.models.weights.stored import export_weights

FEATURES, CLASSES = 16, 10


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(),
                                    nn.Linear(128, CLASSES))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build() -> Classifier:
    """The builder."""
    return Classifier()


def task(rows: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Points around ten centres that overlap."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (rows,), generator=draw)
    return centres[labels] + 0.8 * torch.randn(rows, FEATURES, generator=draw), labels


@pytest.fixture(scope="module")
def trained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = Classifier()
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    x, labels = task(2000, seed=2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(made(x), labels).backward()
        optimizer.step()
    return made.state_dict()


def classifier(weights: dict[str, Tensor]) -> Classifier:
    made = Classifier().eval().requires_grad_(False)
    made.load_state_dict(weights)
    return made


def test_each_weight_is_within_half_a_step_of_its_outputs_own_scale() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 8)
    with torch.no_grad():
        linear.weight[3] *= 1000  # a scale for all would lose the others
        linear.weight[5] = 0
    made = Int8Linear(linear)
    step = linear.weight.abs().amax(dim=1) / 127
    assert (made.values.dtype, made.weight.dtype) == (torch.int8, torch.float32)
    assert ((made.weight - linear.weight).abs() <= 0.5 * step.unsqueeze(1) * 1.001).all()
    x = torch.randn(5, 64)
    assert torch.equal(made(x), F.linear(x, made.weight, linear.bias))
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype == torch.bfloat16


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("features", "outputs"), [(64, 8), (7, 5), (192, 33), (100, 3), (1, 1)])
def test_in_bf16_products_of_any_shape_are_those_of_the_values_rounded_twice(
    features: int, outputs: int, bias: bool
) -> None:
    torch.manual_seed(0)
    made = Int8Linear(nn.Linear(features, outputs, bias=bias))
    for rows in (1, 3, 16, 17, 40):
        x = torch.randn(2, rows, features).bfloat16()[: 1 if rows == 16 else 2]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = made(x.float())
            product = x.double() @ (made.values * made.scale.double().unsqueeze(1)).T
            exact = product if made.bias is None else product + made.bias
        assert found.dtype == torch.bfloat16 and found.shape == exact.shape
        assert ((found.double() - exact).abs() <= 2**-8 * 1.02 * (exact.abs() + product.abs())).all()


def test_a_trained_classifier_keeps_its_answers_in_a_quarter_of_the_bytes(trained: dict[str, Tensor]) -> None:
    """And says so: the answers to the first rows are compared before and after."""
    x, labels = task(1000, seed=3)
    whole, made = classifier(trained), classifier(trained)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.flatten().numpy()), FEATURES)})
    found = quantize_compared(RowPredictor(made, ColumnChoice((), ("x",), None)), table)
    answers, before = made(x).argmax(1), whole(x).argmax(1)
    agreement = (answers == before).float().mean().item()
    assert found.same == int((answers == before).sum()) and found.rows == len(x)
    assert agreement >= 0.98 and (before == labels).float().mean() > 0.9 and found.layers == 3
    assert found.before == sum(layer.weight.nbytes for layer in whole.layers if isinstance(layer, nn.Linear))
    assert found.after <= 0.3 * found.before
    held = sum(t.nbytes for t in [*made.parameters(), *made.buffers()])
    assert held < 0.32 * sum(t.nbytes for t in whole.parameters()), "nothing of the float weights is left"


def test_wrong_weights_are_seen_as_other_answers(trained: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(self: Int8Linear, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.roll(1, 0), self.bias)

    monkeypatch.setattr(Int8Linear, "forward", halved)
    x, _ = task(200, seed=3)
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.flatten().numpy()), FEATURES)})
    found = quantize_compared(RowPredictor(classifier(trained), ColumnChoice((), ("x",), None)), table)
    assert found.rows == 200 and found.same < 100


def test_a_tied_head_stays_and_models_that_ask_for_the_format_of_a_weight_work() -> None:
    language = gpt(layers=1, heads=2, width=16, context=8, vocab_size=50).module.eval()
    head = language.get_submodule("head")
    quantize(language)
    assert type(head) is Head and head.weight is language.get_parameter("tokens.weight")
    assert language(input_ids=torch.arange(8).unsqueeze(0))["logits"].shape == (1, 8, 50)
    images = cnn(channels=[4], image_shape=[8, 8], num_classes=3).module.eval()
    assert quantize(images).layers == 1
    assert images(torch.zeros(2, 8, 8, dtype=torch.uint8)).shape == (2, 3), "the head's weight names the input's format"
    with pytest.raises(InputError, match=r"infer\.quantize: got int8 with a model without linear layers"):
        quantize(nn.Sequential(nn.Conv2d(1, 1, 3)))


def test_values_are_the_same_within_a_hundredth() -> None:
    assert same_answer(1.0, 1.009) and not same_answer(1.0, 1.02)
    assert same_answer([10.0, 0.0], [10.0, 0.09]) and not same_answer([10.0, 0.0], [10.0, 0.2])
    assert same_answer("a", "a") and not same_answer("a", "b") and not same_answer([1.0], [1.0, 2.0])
    assert same_answer([0.0], [0.0])


@pytest.mark.parametrize(("room", "compared"), [(None, 20), (40_000, 0)])
def test_weights_that_do_not_fit_the_device_are_made_smaller_before_they_go_there(
    room: int | None, compared: int, trained: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(loading, "room_on", lambda device: room)
    moved: list[bool] = []
    to = nn.Module.to

    def noted(self: nn.Module, *given: Any) -> nn.Module:
        moved.append(quantization_of(self) is not None)
        return to(self, *given)

    path = str(tmp_path / "model.safetensors")
    export_weights(trained, path)
    model = InferenceModel(ModelConfig(builder=f"{__name__}:build", init_from=path))
    monkeypatch.setattr(nn.Module, "to", noted)
    predictor = model.load(InferConfig(quantize="int8"), pa.schema([("x", pa.list_(pa.float32(), FEATURES))]))
    assert moved[-1] is (compared == 0)
    found = quantization_of(predictor.module)
    assert (found is None) is (compared > 0)


@pytest.mark.long
@pytest.mark.covers("INF-20")
def test_a_job_with_int8_weights_reports_bytes_and_agreement(
    run_cli: Callable[..., Any], trained: dict[str, Tensor], tmp_path: Path
) -> None:
    x, labels = task(300, seed=3)
    (tmp_path / "own.py").write_text(SOURCE)
    export_weights(trained, str(tmp_path / "model.safetensors"))
    rows = pa.FixedSizeListArray.from_arrays(pa.array(x.flatten().numpy()), FEATURES)
    parquet.write_table(pa.table({"x": rows, "label": labels.numpy()}), tmp_path / "in.parquet")
    common = ("infer", "own:build", "model.init_from=model.safetensors", "infer.input=in.parquet", "infer.label=label")
    answers, told = {}, {}
    for name, more in (("float", ()), ("int8", ("infer.quantize=int8",))):
        done = run_cli(*common, *more, f"infer.output={name}", cwd=tmp_path)
        assert done.code == 0, done.text
        told[name] = done.text
        answers[name] = parquet.read_table(tmp_path / name / "predictions.parquet")["prediction"].to_pylist()
    summary = json.loads((tmp_path / "int8/summary.json").read_text())["quantized"]
    assert summary["rows"] == 32 and summary["same"] >= 31 and summary["after"] <= 0.3 * summary["before"]
    assert json.loads((tmp_path / "float/summary.json").read_text())["quantized"] is None
    same = sum(a == b for a, b in zip(answers["float"], answers["int8"], strict=True))
    assert same >= 0.98 * len(x)
    assert "int8: 3 linear layers in " in told["int8"] and "of 32 answers are those of the weights" in told["int8"]
    assert "int8:" not in told["float"]
    refused = run_cli(*common, "infer.quantize=int8", "infer.stages=2", "infer.output=x", cwd=tmp_path)
    assert refused.code == 2 and "infer.quantize: got int8 with infer.stages 2" in refused.text


SOURCE = f"""
from torch import nn

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear({FEATURES}, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(),
                                    nn.Linear(128, {CLASSES}))

    def forward(self, x):
        return self.layers(x)

def build():
    return Classifier()
"""
