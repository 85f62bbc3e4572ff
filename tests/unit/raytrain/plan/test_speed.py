"""What a plan makes of compile, cuDNN's search and fused optimizers, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain.config.sections import LoopConfig, OptimConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Deferred, Resolved
from raytrain.plan.machines import DevicePool
from raytrain.plan.speed import choose_compile, choose_cudnn_benchmark, choose_optimizer_kernels

PARALLEL = Resolved("data_parallel", "one GPU each")


def compiled(
    missing: str | None = None, strategy: str = "data_parallel", on_gpu: bool = False, steps: int | None = None,
    **loop: Any,
) -> tuple[Any, list[str]]:  # fmt: skip
    warnings: list[str] = []
    made = choose_compile(
        LoopConfig(**loop), Resolved(strategy, ""), missing=missing, warnings=warnings, steps=steps, on_gpu=on_gpu
    )
    return made, warnings


def machines(device: str) -> Any:
    class Fake:
        on_gpu = device == "cuda"

    Fake.device = Resolved(device, "a test")  # type: ignore[attr-defined]
    return Fake


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_each_mode_is_planned_with_its_parts(mode: str) -> None:
    made, warnings = compiled(compile=mode, compile_parts=["router", "experts"])
    assert made.value == mode and "router, experts" in made.reason
    assert bool(warnings) == (mode == "max-autotune"), "it chooses by time: rounding only"
    assert compiled(compile="off")[0] is None


def test_auto_is_measured_where_it_can_be_and_says_why_not_elsewhere() -> None:
    made, warnings = compiled(steps=100)
    assert made == compiled()[0] == Deferred(made.how, ("off", "default"), made.reason) and "long enough" in made.reason
    for why, arguments in {
        "g++": {"missing": "no g++"}, "fsdp": {"strategy": "fsdp"}, "loop.deterministic": {"deterministic": True},
        "99 steps are too few": {"steps": 99}, "1 step is too few": {"steps": 1},
    }.items():  # fmt: skip
        off, more = compiled(**arguments)
        assert off.value == "off" and why in off.reason and more == warnings == [], "no fall-back of what was asked for"


def test_without_a_compiler_the_plan_has_off_with_the_reason() -> None:
    made, warnings = compiled(compile="default", missing="no C++ compiler: g++ is not on the PATH")
    assert made.value == "off" and "g++" in made.reason
    assert len(warnings) == 1 and "runs eager" in warnings[0] and "g++" in warnings[0]


@pytest.mark.parametrize(
    ("key", "loop", "strategy"),
    [
        ("loop.compile", {"compile": "max-autotune", "deterministic": True}, "data_parallel"),
        ("loop.compile_parts", {"compile": "default", "compile_parts": "all", "activation_checkpointing": True}, "x"),
        ("loop.compile_parts", {"compile": "default", "compile_parts": "all"}, "fsdp"),
    ],
)
def test_incompatible_keys_are_refused_by_name(key: str, loop: dict[str, Any], strategy: str) -> None:
    with pytest.raises(InputError) as caught:
        compiled(strategy=strategy, **loop)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("loop", "strategy", "named"),
    [
        ({"compile_parts": "blocks"}, "data_parallel", "loop.compile_parts blocks"),
        ({"compile_parts": ["router"]}, "data_parallel", "router"),
        ({"activation_checkpointing": True}, "data_parallel", "loop.activation_checkpointing true"),
        ({}, "fsdp", "scale.strategy fsdp"),
        ({}, "expert_parallel", "scale.strategy expert_parallel"),
    ],
)
def test_cuda_graphs_of_parts_are_refused_before_the_start(loop: dict[str, Any], strategy: str, named: str) -> None:
    """torch fails when the output of one graph is the input of another (pytorch #152887), in the first evaluation."""
    with pytest.raises(InputError, match=r"loop\.compile: got reduce-overhead on a GPU") as caught:
        compiled(strategy=strategy, on_gpu=True, compile="reduce-overhead", **loop)
    assert named in str(caught.value) and "152887" in str(caught.value)
    for allowed in ({"on_gpu": False, "compile": "reduce-overhead"}, {"on_gpu": True, "compile": "max-autotune"}):
        assert compiled(strategy=strategy, **loop, **allowed)[0] is not None


def test_cuda_graphs_of_the_full_model_are_planned() -> None:
    for parts in ("auto", "all"):
        made, _ = compiled(on_gpu=True, compile="reduce-overhead", compile_parts=parts)
        assert made.value == "reduce-overhead" and "the full model" in made.reason


def test_cudnn_benchmark_is_on_with_a_gpu_unless_forbidden() -> None:
    gpu, cpu = machines("cuda"), machines("cpu")

    def value(on: type[DevicePool], **loop: Any) -> Any:
        made = choose_cudnn_benchmark(LoopConfig(**loop), on)  # type: ignore[arg-type]
        return None if made is None else made.value

    assert value(gpu) is True and value(cpu) is None and value(gpu, deterministic=True) is False
    assert value(gpu, cudnn_benchmark=False) is False and value(cpu, cudnn_benchmark=True) is True
    with pytest.raises(InputError) as caught:
        value(gpu, cudnn_benchmark=True, deterministic=True)
    assert caught.value.key == "loop.cudnn_benchmark"


def test_fused_is_the_rule_and_plain_a_choice() -> None:
    def value(strategy: Resolved = PARALLEL, **optim: Any) -> Any:
        return choose_optimizer_kernels(OptimConfig(**optim), machines("cpu"), strategy).value

    assert value() == "fused" and value(fused=False) == "plain"
    shards = Resolved("fsdp", "scale.strategy")
    assert [value(shards, name=name) for name in ("adamw", "sgd", "muon")] == ["fused", "plain", "fused"]
