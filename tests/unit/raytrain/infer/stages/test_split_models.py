"""Models over stages of threads: the outputs and texts of the whole model, and what each stage reads and keeps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts.config import ExpertsConfig
from experts.models import moe_gpt
from raytrain.config.sections import ModelConfig
from raytrain.errors import InputError, OutOfMemory, RunError
from raytrain.infer.generate import Sampling, generate, greedy_answers
from raytrain.infer.model import InferenceModel
from raytrain.infer.stages.partition import plan_stages
from raytrain.infer.stages.split import SplitModule, StagePipeline, StageSplit, load_stage, local_pipeline, skeleton_of
from raytrain.infer.stages.stage import parts_of
from raytrain.models.gpt import gpt
from raytrain.models.weights.stored import export_weights
from raytrain.trainable import Trainable

SIZES: dict[str, Any] = {"layers": 3, "heads": 2, "width": 32, "context": 40, "vocab_size": 50}
PROMPTS = [[1, 2, 3, 4, 5], [3, 4], [7, 8, 9]]
IDS = torch.arange(27).reshape(3, 9) % 50


class Stack(nn.Module):
    """A user's model: a list that repeats no class, between functions; `residual` passes the cut on another way."""

    def __init__(self, residual: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 3))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        if (x > 1e6).any():
            raise MemoryError
        x = x * self.scale
        return self.net(x) + (x[:, :3] if self.residual else 0)


def build(residual: bool = False) -> nn.Module:
    """The builder of `Stack`."""
    return Stack(residual)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Sums are added up in the same order everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Opened = Callable[..., SplitModule]


@pytest.fixture
def split() -> Any:
    """`split(model, stages)`: the model over stages in this process."""
    pipelines: list[StagePipeline] = []

    def start(model: InferenceModel, stages: int) -> SplitModule:
        plan = plan_stages(parts_of(skeleton_of(model)), stages)
        pipelines.append(local_pipeline(model, StageSplit(plan, 4), threads=1))
        return SplitModule(skeleton_of(model).module, pipelines[-1], inflight=4)

    yield start
    for pipeline in pipelines:
        pipeline.close()


def stored(folder: Path, module: nn.Module, sections: dict[str, Any] | None = None, **keys: Any) -> InferenceModel:
    """The model of a builder with the weights of a module, from a file."""
    path = str(folder / "model.safetensors")
    export_weights(module.state_dict(), path)
    return InferenceModel(ModelConfig.model_validate({**keys, "init_from": path}), sections or {})


def language_model(kind: str, folder: Path) -> tuple[InferenceModel, nn.Module]:
    """A small model whose tokens differ, and itself whole."""
    torch.manual_seed(0)
    if kind == "gpt":
        module = gpt(**SIZES).module
        nn.init.normal_(module.get_parameter("tokens.weight"))
        return stored(folder, module, builder="raytrain.models.gpt:gpt", **SIZES), module.eval()
    experts = ExpertsConfig(capacity_factor=0.6 if kind == "moe with capacity" else None)
    module = moe_gpt(**SIZES, experts=experts).module
    nn.init.normal_(module.get_parameter("tokens.weight"))
    return stored(folder, module, {"experts": experts}, builder="experts.models:moe_gpt", **SIZES), module.eval()


@pytest.mark.parametrize("stages", [2, 3, 6])
@pytest.mark.parametrize("kind", ["gpt", "moe", "moe with capacity"])
def test_our_models_say_the_same_over_any_number_of_stages(
    kind: str, stages: int, tmp_path: Path, split: Opened
) -> None:
    model, whole = language_model(kind, tmp_path)
    module = split(model, stages)
    with torch.no_grad():
        assert torch.equal(module(input_ids=IDS)["logits"], whole(input_ids=IDS)["logits"])
    drawn = {"temperature": 3.0, "seed": 3}
    for sampling in (Sampling(50), Sampling(20, **drawn, top_k=10), Sampling(30, **drawn, end_ids=frozenset(range(8)))):
        expected = generate(whole, PROMPTS, sampling=sampling, context=SIZES["context"])
        assert generate(module, PROMPTS, sampling=sampling, context=SIZES["context"]) == expected
    assert len({len(answer) for answer in expected}) > 1 and module.takes_cache == (kind != "moe with capacity")


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Gemma3"])
def test_models_of_transformers_say_the_same_with_their_caches_in_the_stages(
    kind: str, tmp_path: Path, split: Opened
) -> None:
    """Gemma attends in a sliding window in most layers; GPT-2 hands its cache on by position."""
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 50, "eos_token_id": 5, "bos_token_id": 6, "pad_token_id": 5}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "Llama":
        config = transformers.LlamaConfig(**common, **sizes, num_hidden_layers=3, tie_word_embeddings=True)
        kinds = transformers.LlamaForCausalLM
    elif kind == "GPT2":
        config = transformers.GPT2Config(**common, n_embd=32, n_layer=3, n_head=4, n_positions=64)
        kinds = transformers.GPT2LMHeadModel
    else:
        config = transformers.Gemma3TextConfig(**common, **sizes, num_hidden_layers=7, head_dim=8, sliding_window=6)
        kinds = transformers.Gemma3ForCausalLM
    config.initializer_range = 0.5
    torch.manual_seed(1)
    whole = kinds(config).eval()
    whole.save_pretrained(tmp_path)
    builder = "raytrain.models.transformers:causal_lm"
    module = split(InferenceModel(ModelConfig.model_validate({"builder": builder, "path": str(tmp_path)})), 3)
    with torch.no_grad():
        assert torch.equal(module(input_ids=IDS)["logits"], whole(input_ids=IDS).logits)
    sampling = Sampling(24, end_ids=frozenset({5}))
    continued = module.own_generate(SimpleNamespace(decode=str, encode=list), sampling)
    expected = greedy_answers(whole, None, PROMPTS, sampling=sampling, numbers=range(3))
    assert continued(PROMPTS, sampling=sampling, numbers=range(3)) == expected and max(map(len, expected)) > 10


def test_batches_in_flight_do_not_mix_and_caches_end(tmp_path: Path, split: Opened) -> None:
    model, whole = language_model("gpt", tmp_path)
    module, sampling = split(model, 2), Sampling(12)
    prompts = [[[one, two, 3]] for one in range(6) for two in range(4)]
    expected = [generate(whole, one, sampling=sampling, context=40) for one in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: generate(module, one, sampling=sampling, context=40), prompts))
    assert found == expected
    times = module.pipeline.take_times()
    assert times.passes == 24 * 12 and 0 < times.bubble < 1 and min(times.busy_s) > 0
    assert module.pipeline.take_times().passes == 0


def test_the_expected_bubble_is_that_of_the_formula() -> None:
    from raytrain.infer.stages.split import StageTimes

    assert StageTimes([7.0, 7.0], 8.0, passes=16, rounds=2).expected_bubble(8) == pytest.approx(1 / 9)
    assert StageTimes([7.0, 7.0], 8.0, passes=16, rounds=2).bubble == pytest.approx(1 / 8)
    assert StageTimes([1.0, 1.0], 2.0, passes=1, rounds=1).expected_bubble(8) == pytest.approx(1 / 2)
    assert StageTimes([1.0, 1.0], 2.0, passes=50, rounds=1).expected_bubble(1) == pytest.approx(1 / 2)


def test_a_list_of_the_users_is_split_and_an_error_of_a_stage_reaches_the_caller(tmp_path: Path, split: Opened) -> None:
    torch.manual_seed(0)
    whole = Stack()
    model = stored(tmp_path, whole, builder=f"{__name__}:build")
    assert [part.name for part in parts_of(skeleton_of(model))] == ["net.0", "net.2", "net.3", "net.4"]
    module, x = split(model, 4), torch.randn(5, 4)
    assert torch.equal(module(x)["logits"], whole(x))
    with pytest.raises(OutOfMemory):
        module(torch.full((5, 4), 1e7))
    with pytest.raises(RunError, match="shapes cannot be multiplied"):
        module(torch.zeros(5, 9))
    assert torch.equal(module(x=x)["logits"], whole(x))


def test_a_value_that_passes_a_cut_on_another_way_is_noticed(tmp_path: Path, split: Opened) -> None:
    model = stored(tmp_path, Stack(residual=True), builder=f"{__name__}:build", residual=True)
    with pytest.raises(RunError, match="cannot be split there"):
        split(model, 2)(torch.randn(5, 4))


def test_models_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="of one part"):
        parts_of(Trainable(nn.Linear(2, 2), lambda module, batch: None))  # pyright: ignore
    model = stored(tmp_path, nn.Linear(2, 2), builder=f"{__name__}:build")
    plan = plan_stages(parts_of(skeleton_of(model)), 2)
    with pytest.raises(InputError, match="9 missing tensors"):
        load_stage(model, StageSplit(plan, 1), 0, torch.device("cpu"))


def test_a_stage_reads_its_own_tensors_only(tmp_path: Path) -> None:
    model, _ = language_model("moe", tmp_path)
    trainable = skeleton_of(model)
    plan = plan_stages(parts_of(trainable), 3)
    stages = [load_stage(model, StageSplit(plan, 1), number, torch.device("cpu")) for number in range(3)]
    buffers = sum(buffer.numel() * buffer.element_size() for _, buffer in trainable.module.named_buffers())
    for stage, held in zip(stages, plan.bytes, strict=True):
        assert held <= stage.bytes_read <= held + buffers
        own = {id(tensor): tensor.nbytes for tensor in stage.module.parameters() if not tensor.is_meta}
        spread = 0 if stage.stage == 0 else stage.module.get_parameter("positions").nbytes  # no memory behind it
        assert sum(own.values()) - spread == held
