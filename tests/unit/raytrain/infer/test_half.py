"""Products' weights in half precision: the outputs of autocast to the bit, in half of the bytes, and what stays."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experts.config import ExpertsConfig
from experts.models import moe_gpt
from jobs.inference.layout import memory_of
from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.infer.generate import Sampling, generate
from raytrain.infer.model import InferenceModel
from raytrain.infer.quantize import Int8Linear, halve
from raytrain.infer.stages.partition import plan_stages
from raytrain.infer.stages.split import SplitModule, StageSplit, load_stage, local_pipeline, skeleton_of
from raytrain.infer.stages.stage import parts_of
from raytrain.infer.worker import InferenceWorker, Work
from raytrain.models.gpt import GPT, gpt
from raytrain.models.weights.stored import export_weights

SIZES: dict[str, Any] = {"layers": 2, "heads": 2, "width": 32, "context": 24, "vocab_size": 50}
IDS = torch.arange(27).reshape(3, 9) % 50


class Reads(nn.Module):
    """A user's module, which multiplies by a weight beside its product, and holds a built-in model."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.inner = nn.Linear(50, 50), gpt(**SIZES).module

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.proj(self.inner(input_ids=input_ids)["logits"]) * self.proj.weight[0]}


class OwnGPT(GPT):
    """A user's variant, which reads a weight."""

    def logits(self, x_BSD: Tensor) -> Tensor:
        return super().logits(x_BSD) * self.get_parameter("blocks.0.attention.out.weight").sum()


def formats(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: one.dtype for name, one in module.named_parameters(remove_duplicate=False)}


def transformers_model(kind: str) -> nn.Module:
    library: Any = pytest.importorskip("transformers")
    if kind == "gpt2":
        return library.GPT2LMHeadModel(library.GPT2Config(vocab_size=50, n_positions=24, n_embd=32, n_layer=2,
            n_head=2, eos_token_id=None, bos_token_id=None))  # fmt: skip
    return library.LlamaForCausalLM(library.LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=24))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["gpt", "moe", "gpt2", "llama"])
def test_language_models_give_the_logits_of_autocast_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    if kind in ("gpt", "moe"):
        made: Any = gpt(**SIZES) if kind == "gpt" else moe_gpt(**SIZES, experts=ExpertsConfig(bias=True))
        module = made.module
    else:
        module = transformers_model(kind)
    module = module.eval().requires_grad_(False)
    converted = copy.deepcopy(module)
    halve(converted, dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected, found = (one(input_ids=IDS)["logits"] for one in (module, converted))
        assert torch.equal(found, expected)
    matrices = {name: one for name, one in formats(converted).items() if converted.get_parameter(name).ndim > 1}
    kept = {name for name, one in matrices.items() if one == torch.float32}
    tables = {"gpt": {"tokens.weight", "positions"}, "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
              "llama": {"model.embed_tokens.weight"}}  # fmt: skip
    vectors = {f"blocks.{layer}.feed_forward.{name}" for layer in (0, 1)
               for name in ("router.weight", "experts.b1", "experts.b2")}  # fmt: skip
    assert kept == (tables["gpt"] | vectors if kind == "moe" else tables[kind])
    if kind != "llama":  # the tied head
        assert formats(module) == dict.fromkeys(formats(module), torch.float32)


@pytest.mark.parametrize("kind", ["holds", "inherits"])
def test_models_of_users_stay_as_they_are(kind: str) -> None:
    torch.manual_seed(0)
    module = Reads() if kind == "holds" else gpt(**SIZES).module
    if kind == "inherits":
        module.__class__ = OwnGPT
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = module.eval()(input_ids=IDS)["logits"]
        halve(module, torch.bfloat16)
        assert torch.equal(module(input_ids=IDS)["logits"], expected)
    assert set(formats(module).values()) == {torch.float32}


def test_layers_that_others_have_changed_or_that_share_a_weight_stay() -> None:
    module = gpt(**SIZES).module
    first, second = module.get_submodule("blocks.0.feed_forward"), module.get_submodule("blocks.1.feed_forward")
    first.get_submodule("up").register_forward_hook(lambda layer, given, made: made * layer.weight[0, 0])
    first.get_submodule("out").forward = lambda x: F.linear(x, first.get_parameter("out.weight").square())
    attention = module.get_submodule("blocks.1.attention")
    attention.get_submodule("out").weight = module.get_submodule("blocks.0.attention.out").weight
    second.double()
    with torch.no_grad():
        halve(module, torch.bfloat16)
    kept = {name for name, one in formats(module).items() if one != torch.bfloat16 and "norm" not in name}
    assert kept == {"positions", "tokens.weight", "blocks.0.feed_forward.up.weight", "blocks.0.feed_forward.out.weight",
                    "blocks.1.feed_forward.up.weight", "blocks.1.feed_forward.out.weight",
                    "blocks.0.attention.out.weight", "blocks.1.attention.out.weight"}  # fmt: skip


def stored(folder: Path, dtype: str = "bf16", **sizes: Any) -> InferenceModel:
    torch.manual_seed(0)
    keys = {**SIZES, **sizes}
    path = str(folder / "model.safetensors")
    export_weights(gpt(**keys).module.state_dict(), path)
    config = ModelConfig.model_validate({"builder": "raytrain.models.gpt:gpt", "init_from": path, **keys})
    return InferenceModel(config, facts={"vocab_size": keys["vocab_size"]}, dtype=dtype)


@pytest.mark.parametrize(("layers", "vocabulary"), [(2, 50), (5, 300)])
def test_what_is_loaded_and_what_the_plan_says_is_half_of_the_products(
    layers: int, vocabulary: int, tmp_path: Path
) -> None:
    held: dict[str, int] = {}
    for dtype in ("fp32", "bf16"):
        model = stored(tmp_path, dtype, layers=layers, vocab_size=vocabulary)
        module = model.load(InferConfig(), pa.schema([("prompt", pa.string())])).module
        held[dtype] = sum(one.nbytes for one in module.parameters())
        infer = SimpleNamespace(max_new_tokens=4)
        target: Any = SimpleNamespace(model=model, spec=SimpleNamespace(infer=infer))
        estimate = memory_of(target, rows=1)
        assert estimate is not None and estimate.weights == held[dtype]
    products, head = layers * 12 * 32 * 32, vocabulary * 32
    assert held["fp32"] - held["bf16"] == 2 * products - 2 * head


def test_int8_weights_are_made_of_float32_and_what_is_left_is_halved(tmp_path: Path) -> None:
    model, schema = stored(tmp_path, vocab_size=256), pa.schema([("prompt", pa.string())])
    module = model.load(InferConfig(quantize="int8"), schema).module
    assert set(formats(module).values()) == {torch.float32}, "not before they are quantised"
    whole = gpt(**SIZES | {"vocab_size": 256}).module
    whole.load_state_dict(module.state_dict())
    rows: Any = SimpleNamespace(schema=schema, rows=2, read=lambda *_: pa.table({"prompt": ["ab", "c"]}))
    worker = InferenceWorker(Work(model, InferConfig(quantize="int8", max_new_tokens=3), rows, "", 1, 0), "w")
    made = worker.load().predictor.module
    layer = made.get_submodule("blocks.0.attention.qkv")
    assert isinstance(layer, Int8Linear)
    assert torch.equal(layer.values, Int8Linear(whole.get_submodule("blocks.0.attention.qkv")).values)  # pyright: ignore[reportArgumentType]
    assert formats(made)["head.weight"] == torch.bfloat16 and formats(made)["tokens.weight"] == torch.float32


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_hold_the_same_weights_and_say_the_same(stages: int, tmp_path: Path) -> None:
    model = stored(tmp_path, layers=3)
    whole = model.load(InferConfig(), pa.schema([("prompt", pa.string())])).module
    trainable = skeleton_of(model)
    plan = plan_stages(parts_of(trainable), stages)
    wide = parts_of(skeleton_of(replace(model, dtype="fp32")))
    assert [part.bytes for part in plan.parts][1] < 0.51 * wide[1].bytes
    split = StageSplit(plan, 2)
    last = load_stage(model, split, stages - 1, torch.device("cpu"))
    assert formats(last.module)["head.weight"] == torch.bfloat16
    pipeline = local_pipeline(model, split, threads=1)
    module = SplitModule(skeleton_of(model).module, pipeline, inflight=2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = generate(whole, [[1, 2, 3], [4]], sampling=Sampling(8), context=24)
    assert generate(module, [[1, 2, 3], [4]], sampling=Sampling(8), context=24) == expected
    pipeline.close()
