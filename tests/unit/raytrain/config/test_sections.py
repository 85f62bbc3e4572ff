"""The sections: defaults, ranges, strict types, and what a Python object may do in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config import ClusterConfig, Section, TelemetryConfig
from experts.config import ExpertsConfig
from raytrain.config.messages import expected_text, key_rows, section_of
from raytrain.config.sections import (
    DataConfig,
    InferConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RetryConfig,
    SaveConfig,
    ScaleConfig,
    TuneConfig,
)

ROOT = Path(__file__).resolve().parents[4]


class NoTruth:
    """Compares like a tensor: the result has no truth value."""

    def __eq__(self, other: object) -> Any:
        class Elementwise:
            def __bool__(self) -> bool:
                raise RuntimeError("ambiguous")

        return Elementwise()

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> NoTruth:
        raise AssertionError("a dataset is never copied")


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (OptimConfig, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, "max_grad_norm": 1.0,
                       "name": "adamw", "schedule": "cosine", "warmup_steps": "auto"}),
        (LoopConfig, {"global_batch_size": 32, "micro_batch_size": "auto", "log_every": 10,
                      "max_steps": None, "epochs": None, "eval_batches": None, "compile": "auto"}),
        (SaveConfig, {"keep": 3, "dir": "runs", "every": "auto"}),
        (ScaleConfig, {"workers": "auto", "strategy": "auto", "mode": "auto", "threads": "auto"}),
        (PrecisionConfig, {"dtype": "auto", "fallback": True}),
        (ExpertsConfig, {"hosts": "auto", "capacity_factor": None, "noise": 0.0, "balance": "both"}),
        (RetryConfig, {"restarts_without_progress": 3, "nonfinite_steps": 3, "stop_grace_s": 60.0}),
        (ClusterConfig, {"memory_fraction": 0.9, "address": None}),
    ],
)  # fmt: skip
def test_defaults_are_those_of_the_design(section: type[Section], values: dict[str, Any]) -> None:
    made = section()
    assert {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize(
    ("section", "key", "good", "bad"),
    [
        (OptimConfig, "lr", [1, 1e-9], [0, -1.0, float("inf"), float("nan"), True, "1e-3", None]),
        (OptimConfig, "betas", [[0, 0.5], (0.9, 0.95)],
         [[0.9], [0.9, 1.0], [0.9, 0.9, 0.9], 0.9, [True, 0.9]]),
        (OptimConfig, "max_grad_norm", [0, None, 5.0], [-1, "off"]),
        (OptimConfig, "warmup_steps", [0, 7, "auto"], [-1, 1.5, True, None, "Auto"]),
        (OptimConfig, "final_lr_fraction", [0, 1], [1.1, -0.1]),
        (LoopConfig, "max_steps", [1, None], [0, 2.0, "7", True, "auto"]),
        (LoopConfig, "global_batch_size", [1, "auto"], [0, None, 1.0, [32]]),
        (LoopConfig, "log_every", [0, 1, "epoch"], [-1, None, "auto"]),
        (LoopConfig, "compile", ["off", "max-autotune"], [False, "max_autotune", None]),
        (LoopConfig, "deterministic", [True], [1, "true", None]),
        (SaveConfig, "keep", [1, "all"], [0, -1, None]),
        (SaveConfig, "dir", ["s3://bucket/runs"], ["", 3, None]),
        (ScaleConfig, "workers", [1, "auto", [1, 4], (2, 2)],
         [0, [4, 1], [1], [0, 2], [1, 2, 3], True, None]),
        (ExpertsConfig, "hosts", [0, 3, "auto", "colocated", {"A100": 4, "T4": 8}],
         [-1, {}, {"A100": 0}, {"A100": True}, {"": 1}, {1: 1}, "none", None]),
        (ExpertsConfig, "inflight", [1, 2, "auto"], [0, 3, True, 1.0, "1"]),
        (ExpertsConfig, "capacity_factor", [None, 1.25], [0, -1.0]),
        (DataConfig, "eval_fraction", [0, 0.5], [1, 1.5, -0.1, None]),
        (DataConfig, "source", ["text", "my_pkg.my_mod:dataset", None], ["", "my mod", "a:", ":b", "a/b", 3]),
        (ModelConfig, "builder", ["a.b:c", None], ["a", "a:b:c", "a.:b", "a b:c", 7]),
        (TelemetryConfig, "observers", [[], ["my_mod:Observer"]], ["my_mod:Observer", [1], None]),
        (ClusterConfig, "memory_fraction", [1, 0.1], [0, 1.01]),
        (ScaleConfig, "gpus_per_worker", [1, 0.5, 0.33, 0.3333, 0.25, 0.1], [0, -0.5, 1.5, 2, 0.4, 0.34, 0.75]),
        (InferConfig, "batch_size", [1, "auto"], [0, None]),
        (TuneConfig, "max_trials", [1, None], [0, "all"]),
    ],
)  # fmt: skip
def test_a_section_accepts_its_values_and_nothing_else(
    section: type[Section], key: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        section(**{key: value})
    accepted = []
    for value in bad:
        try:
            section(**{key: value})
        except ValidationError:
            continue
        accepted.append(value)
    assert accepted == []


def test_lists_become_tuples_and_integers_become_floats() -> None:
    optim, scale = OptimConfig(betas=[0, 0.5], lr=1), ScaleConfig(workers=[1, 4])
    assert (optim.betas, optim.lr, scale.workers) == ((0.0, 0.5), 1.0, (1, 4))
    assert [type(value) for value in (*optim.betas, optim.lr)] == [float, float, float]


def test_sections_are_frozen_and_closed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        LoopConfig().max_steps = 3
    with pytest.raises(ValidationError, match="extra"):
        LoopConfig(steps=3)


def test_keys_of_the_builder_and_the_source_are_passed_on_as_given() -> None:
    words = ["a", {"b": 1}]
    model = ModelConfig(builder="a:b", width=64, keys=1, copy=2, words=words)
    assert model.keys == {"width": 64, "keys": 1, "copy": 2, "words": words}
    assert model.keys["words"] is words
    assert DataConfig(source="text", path="x.txt").keys == {"path": "x.txt"}


def test_objects_are_kept_as_they_are_and_never_compared_or_copied() -> None:
    rows, other = NoTruth(), NoTruth()
    data = DataConfig(train=rows)
    assert data.train is rows
    assert data.model_copy().train is rows
    assert data == DataConfig(train=rows)
    assert data != DataConfig(train=other)
    assert "NoTruth" not in repr(data)


@pytest.mark.parametrize("value", ["net", 3, True, 1.5])
def test_a_scalar_is_not_an_object(value: Any) -> None:
    with pytest.raises(ValidationError):
        ModelConfig(module=value)
    with pytest.raises(ValidationError):
        DataConfig(train=value)


def test_open_sections_differ_where_their_keys_do() -> None:
    one = ModelConfig(builder="a:b", width=64)
    assert one == ModelConfig(builder="a:b", width=64)
    assert one != ModelConfig(builder="a:b", width=65)
    assert one != ModelConfig(builder="a:c", width=64)
    assert one != DataConfig(source="text")


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        (LoopConfig, "max_steps", "an integer >= 1 or null"),
        (LoopConfig, "deterministic", "true or false"),
        (OptimConfig, "lr", "a number > 0"),
        (OptimConfig, "betas", "a list of 2, each a number >= 0 and < 1"),
        (OptimConfig, "name", "adamw, sgd or muon"),
        (OptimConfig, "warmup_steps", "an integer >= 0 or auto"),
        (ScaleConfig, "workers", "an integer >= 1, auto or [min, max] with 1 <= min <= max"),
        (ExpertsConfig, "inflight", "1, 2 or auto"),
        (ModelConfig, "builder", "module:function or null"),
        (ModelConfig, "module", "a Python object, given from Python"),
        (TelemetryConfig, "observers", "a list, each a non-empty string"),
        (ClusterConfig, "memory_fraction", "a number > 0 and <= 1"),
    ],
)
def test_the_expected_values_of_a_key_are_one_phrase(section: type[Section], key: str, words: str) -> None:
    assert expected_text(section, key) == words


def test_every_key_has_a_meaning_for_the_help() -> None:
    sections = (
        ModelConfig, DataConfig, OptimConfig, PrecisionConfig, LoopConfig, SaveConfig, ScaleConfig,
        RetryConfig, TuneConfig, InferConfig, ExpertsConfig, TelemetryConfig, ClusterConfig,
    )  # fmt: skip
    rows = [row for section in sections for row in key_rows(section, prefix=section.__name__)]

    def keys(section: type[Any]) -> int:
        inner = (section_of(field) for field in section.model_fields.values())
        return sum(1 if one is None else keys(one) for one in inner)

    assert len(rows) == sum(map(keys, sections))
    assert [row.key for row in rows if not (row.meaning and row.expected and row.default)] == []


def test_importing_the_sections_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, raytrain.config.sections, raytrain.config.decode, experts.config, cluster.config;"
        "print([name for name in ('torch', 'ray', 'pyarrow', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
