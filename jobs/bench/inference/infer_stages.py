"""The part of `bench infer` about a model over two stages: two processes of one thread each, against one of one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate
from jobs.bench.inference.infer_models import VOCABULARY
from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.infer.input import InputRows
from raytrain.infer.model import InferenceModel
from raytrain.infer.worker import Work

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Seconds of one process with the whole model over those of two stages with all batches in flight; 16 / 9 is possible.
GOAL_STAGES = Goal(at_least=1.3)
STAGES = 2
BUILDER = "raytrain.models.gpt:gpt"


def measure_stages(options: Any, found: BenchMeasurement, say: Say) -> None:
    """Seconds of the same batches through the whole model, and over two stages with one or all of them in flight."""
    import torch

    from jobs.driver.runtime import connected
    from raytrain.infer.stages.actors import remote_pipeline
    from raytrain.infer.stages.plan import plan_stages
    from raytrain.infer.stages.split import SplitModule, StageSplit, skeleton_of
    from raytrain.infer.stages.weights import parts_of

    draw = torch.Generator().manual_seed(options.seed)
    shape = (options.stage_rows, options.stage_tokens)
    batches = [torch.randint(VOCABULARY, shape, generator=draw) for _ in range(options.micro_batches)]
    say("stages: starting Ray")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        TemporaryDirectory(prefix="bench-infer-") as folder,
        connected("local", num_cpus=STAGES + 1, num_gpus=0, verbose=False),
        ThreadPoolExecutor(len(batches)) as pool,
        torch.inference_mode(),
    ):
        model, whole = _model(options, Path(folder))
        split = StageSplit(plan_stages(parts_of(skeleton_of(model)), STAGES), len(batches))
        work = Work(model, InferConfig(), InputRows.at([]), folder, 1, 0, 1, split=split)
        pipeline = remote_pipeline(work, cpus=1, gpus=0)
        module = SplitModule(skeleton_of(model).module, pipeline, inflight=len(batches))
        outputs: dict[str, list[Tensor]] = {}
        arms = {
            "whole model": partial(_timed, outputs, "whole", partial(_in_turn, whole, batches)),
            "two stages, 1 in flight": partial(_timed, outputs, "one", partial(_in_turn, module, batches)),
            f"two stages, {len(batches)} in flight": partial(
                _timed, outputs, "all", partial(_at_once, pool, module, batches)
            ),
        }
        say(f"stages: {options.stage_blocks} times {len(arms)} arms of {len(batches)} batches")
        times = alternate(arms, blocks=options.stage_blocks)
        pipeline.close()
    torch.set_num_threads(before)
    equal = all(
        torch.equal(a, b) for name in ("one", "all") for a, b in zip(outputs["whole"], outputs[name], strict=True)
    )
    found.gate(
        Check("stages: the outputs of the whole model, bit for bit", equal, f"{len(batches)} batches of {shape}")
    )
    found.arms |= times
    name = "seconds, whole model in one process / "
    *_, one, every = arms
    found.compare(times, of="whole model", to=one, name=name + one)
    found.compare(times, of="whole model", to=every, name=name + every, goal=GOAL_STAGES)


def _model(options: Any, folder: Path) -> tuple[InferenceModel, nn.Module]:
    """The model with weights in a file, and itself whole."""
    import torch

    from raytrain.models.gpt import gpt
    from raytrain.models.weights.stored import export_weights

    sizes = {"layers": options.stage_layers, "heads": options.heads, "width": options.stage_width,
             "context": options.stage_tokens, "vocab_size": VOCABULARY}  # fmt: skip
    torch.manual_seed(options.seed)
    module = gpt(**sizes).module.eval()
    path = str(folder / "model.safetensors")
    export_weights(module.state_dict(), path)
    return InferenceModel(ModelConfig.model_validate({"builder": BUILDER, "init_from": path, **sizes})), module


def _timed(outputs: dict[str, list[Tensor]], name: str, run: Any) -> float:
    began = time.perf_counter()
    outputs[name] = run()
    return time.perf_counter() - began


def _in_turn(module: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    return [module(input_ids=batch)["logits"] for batch in batches]


def _at_once(pool: ThreadPoolExecutor, module: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    return list(pool.map(lambda batch: module(input_ids=batch)["logits"], batches))
