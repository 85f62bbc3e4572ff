"""The whole job: precedence, where each value came from, round trips, resume rules, what comes later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.job.spec import JobSpec, changed_keys, load_spec, may_change_on_resume, refuse_later
from raytrain.config.decode import encode, load_yaml
from raytrain.errors import InputError

ROOT = Path(__file__).resolve().parents[4]
MINIMAL = "model: {builder: 'my_pkg.my_mod:build', width: 64}\ndata: {source: text, path: input.txt}\n"


class Dataset:
    """Map-style, and neither comparable nor copyable."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a dataset is never compared")

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Dataset:
        raise AssertionError("a dataset is never copied")


def job(**sections: Any) -> dict[str, Any]:
    return {"model": {"builder": "a:b"}, "data": {"source": "text"}, **sections}


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def mistake(*args: Any, **named: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        load_spec(*args, **named)
    return caught.value


# ---------------------------------------------------------------- precedence and sources


@pytest.mark.parametrize(
    ("key", "default", "in_file", "in_flag"),
    [
        pytest.param("precision.dtype", "auto", "bf16", "fp32", marks=pytest.mark.covers("CFG-03")),
        pytest.param("scale.mode", "auto", "cpu", "single_gpu", marks=pytest.mark.covers("CFG-05")),
        pytest.param("scale.strategy", "auto", "data_parallel", "fsdp", marks=pytest.mark.covers("CFG-06")),
        pytest.param("scale.accelerator", None, "cpu", "cuda:0", marks=pytest.mark.covers("CFG-01")),
        pytest.param("loop.global_batch_size", 32, 8, 16, marks=pytest.mark.covers("CFG-15")),
        pytest.param("loop.micro_batch_size", "auto", 4, 8, marks=pytest.mark.covers("CFG-08")),
        pytest.param("model.context", None, 256, 128, marks=pytest.mark.covers("CFG-14")),
        pytest.param("precision.dtype", "auto", "fp32", "bf16", marks=pytest.mark.covers("CFG-02")),
        pytest.param("precision.dtype", "auto", "fp16", "fp32", marks=pytest.mark.covers("CFG-11")),
        pytest.param("cluster.memory_fraction", 0.9, 0.8, 0.5, marks=pytest.mark.covers("CFG-04")),
        pytest.param("loop.micro_batch_size", "auto", 4, "auto", marks=pytest.mark.covers("CFG-07")),
        pytest.param("data.loader_workers", "auto", 0, 4, marks=pytest.mark.covers("CFG-09")),
        pytest.param("data.storage", "auto", "stream", "pinned", marks=pytest.mark.covers("CFG-10")),
        pytest.param("telemetry.log_memory", False, True, False, marks=pytest.mark.covers("CFG-12")),
        ("loop.epochs", None, 10, 3),
        ("optim.betas", (0.9, 0.99), [0.9, 0.95], [0.8, 0.9]),
        ("experts.hosts", "auto", 0, {"A100": 4}),
        ("name", "run", "one", "two"),
        ("seed", 42, 1, 2),
    ],
)
def test_default_gives_way_to_file_and_file_to_command_line(
    tmp_path: Path, key: str, default: Any, in_file: Any, in_flag: Any
) -> None:
    """Ours has no environment layer: default < file < command line. Lists become tuples on the way."""

    def value_in(spec: JobSpec) -> Any:
        encoded: Any = encode(spec)
        for part in key.split("."):
            encoded = encoded.get(part)
        return tuple(encoded) if isinstance(encoded, list) else encoded

    def frozen(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    section, _, name = key.partition(".")
    line = f"{section}: {in_file}\n" if not name else f"{section}: {{{name}: {in_file}}}\n"
    last = {"model": "width: 64", "data": "path: input.txt"}.get(section)  # sections that are there already
    text = MINIMAL + line if last is None else MINIMAL.replace(last, f"{last}, {name}: {in_file}")
    flag = f"{key}={in_flag}".replace("'", "")

    bare, filed = load_spec(write(tmp_path, MINIMAL)), load_spec(write(tmp_path, text))
    both = load_spec(write(tmp_path, text), [flag])
    alone = load_spec(write(tmp_path, MINIMAL), [flag])
    assert value_in(bare.spec) == default
    assert value_in(filed.spec) == frozen(in_file)
    assert value_in(both.spec) == value_in(alone.spec) == frozen(in_flag)

    leaf = f"{key}.A100" if isinstance(in_flag, dict) else key
    assert bare.sources.get(key, "default") == "default"
    assert filed.sources[key] == "file"
    assert both.sources[leaf] == alone.sources[leaf] == "command line"


@pytest.mark.covers("CFG-16")
def test_a_key_in_the_file_and_the_same_as_a_flag_give_the_same_record(tmp_path: Path) -> None:
    """CFG-16: precision, determinism (cuDNN's choice), compile and log interval; only the origin differs."""
    flags = ["precision.dtype=bf16", "loop.deterministic=true", "loop.compile=default", "loop.log_every=7"]
    sections = "precision: {dtype: bf16}\nloop: {deterministic: true, compile: default, log_every: 7}\n"
    filed = load_spec(write(tmp_path, MINIMAL + sections))
    flagged = load_spec(write(tmp_path, MINIMAL), flags)
    keys = [flag.partition("=")[0] for flag in flags]
    assert filed.spec == flagged.spec
    assert encode(filed.spec) == encode(flagged.spec)
    assert load_yaml(filed.merged_text, origin="a") == load_yaml(flagged.merged_text, origin="b")
    assert {key: (filed.sources[key], flagged.sources[key]) for key in keys} == dict.fromkeys(
        keys, ("file", "command line")
    )


def test_every_value_has_a_source(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "experts: {hosts: {A100: 4}}")
    loaded = load_spec(path, ["experts.hosts.T4=8", "seed=1"])
    sections = {name: value for name, value in encode(loaded.spec).items() if isinstance(value, dict)}

    def leaves(values: dict[str, Any], prefix: str = "") -> set[str]:
        inner = {f"{prefix}{name}": value for name, value in values.items()}
        deeper = (leaves(value, f"{key}.") for key, value in inner.items() if isinstance(value, dict) and value)
        return {key for key, value in inner.items() if not (isinstance(value, dict) and value)}.union(*deeper)

    hosts = {"experts.hosts.A100": "file", "experts.hosts.T4": "command line"}
    assert set(loaded.sources) == leaves(sections) | {"name", "seed"}
    assert hosts.items() <= loaded.sources.items()
    assert loaded.sources["model.width"] == "file"
    assert set(loaded.sources.values()) == {"default", "file", "command line"}


def test_another_source_or_model_replaces_the_recipes_whole_section() -> None:
    spec = load_spec(None, ["data.source=jsonl", "data.path=rows.jsonl", "optim.lr=0.5"]).spec
    assert spec.data.source == "jsonl" and spec.data.keys == {"path": "rows.jsonl"}
    assert spec.model.builder == "experts.models:moe_gpt" and spec.optim.lr == 0.5
    other = load_spec(None, ["model.builder=raytrain.models.mlp:mlp"]).spec
    assert other.model.keys == {} and other.data.keys == load_spec(None).spec.data.keys


def test_a_file_does_not_inherit_the_built_in_recipe(tmp_path: Path) -> None:
    recipe, filed = load_spec(), load_spec(write(tmp_path, MINIMAL))
    assert recipe.spec.name == "default"
    assert recipe.sources["model.builder"] == "recipe"
    assert filed.spec.model.keys == {"width": 64}
    assert filed.spec.loop.max_steps is None


def test_the_text_is_as_given_and_the_merged_text_reads_back_as_the_job(tmp_path: Path) -> None:
    text = "# mine\n" + MINIMAL
    loaded = load_spec(write(tmp_path, text), ["loop.max_steps=7", "model.note='1e-3'"])
    assert loaded.text == text
    again = load_spec(write(tmp_path, loaded.merged_text))
    assert again.spec == loaded.spec
    assert again.spec.model.keys["note"] == "1e-3"
    assert set(load_yaml(loaded.merged_text, origin="x")) == {"model", "data", "loop"}


# ---------------------------------------------------------------- Python, and round trips


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"scale": {"workers": [1, 4]}, "optim": {"betas": [0, 0.5], "max_grad_norm": None}},
        {"experts": {"hosts": {"A100": 4, "T4": 8}, "num_experts": 8, "capacity_factor": 1.25}},
        {"model": {"builder": "a:b", "words": ["on", "1e-3", None], "deep": {"x": [1.5]}}, "name": "a.b-c_1"},
        {"tune": {"space": {"loop.global_batch_size": [8, 16]}}, "telemetry": {"observers": ["a:B"]}},
    ],
)
def test_a_job_survives_encoding(sections: dict[str, Any]) -> None:
    spec = load_spec(mapping=job(**sections)).spec
    assert load_spec(mapping=encode(spec)).spec == spec


def test_objects_from_python_stay_themselves_and_are_written_as_placeholders() -> None:
    module, train = Dataset(), {"x": Dataset(), "y": Dataset()}
    given = {"model": {"module": module}, "data": {"train": train, "eval": train}}
    loaded = load_spec(mapping=given, overrides=["loop.max_steps=3"])
    assert loaded.spec.model.module is module
    assert loaded.spec.data.train is train and loaded.mapping["data"]["train"] is train
    assert given == {"model": {"module": module}, "data": {"train": train, "eval": train}}
    assert loaded.sources["data.train"] == "python"
    assert loaded.sources["loop.max_steps"] == "command line"
    written = load_yaml(loaded.text, origin="job.yaml")
    assert written == {
        "model": {"module": "<object Dataset>"},
        "data": {"train": "<object dict>", "eval": "<object dict>"},
        "loop": {"max_steps": 3},
    }
    again = load_spec(mapping=written).spec
    assert encode(again) == encode(loaded.spec)
    assert changed_keys(written, loaded.mapping) == []


def test_the_record_of_objects_is_not_a_job_file(tmp_path: Path) -> None:
    text = load_spec(mapping={"model": {"module": Dataset()}, "data": {"source": "text"}}).text
    error = mistake(write(tmp_path, text))
    assert error.key == "model.module"
    assert "jobs.train" in error.remedy


# ---------------------------------------------------------------- files


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    (tmp_path / "empty.yaml").write_text("")
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.yaml").write_text(MINIMAL)
    expected = {"none.yaml": "no such file", "latin.yaml": "UTF-8", "empty.yaml": "an empty file",
            ".": "a folder", "run": "--resume"}  # fmt: skip
    for name, words in expected.items():
        error = mistake(tmp_path / name)
        assert error.key == str(tmp_path / name)
        assert words in str(error)


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(MINIMAL, encoding="utf-8-sig")
    assert load_spec(path).spec.model.builder == "my_pkg.my_mod:build"


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({}, []),
        ({"loop": {"log_every": 10}, "optim": {"lr": 0.001}}, []),
        ({"loop": {"max_steps": 5, "epochs": 2}}, ["loop.max_steps", "loop.epochs"]),
        ({"experts": {"hosts": {"A100": 4}}}, ["experts.hosts"]),
        ({"model": {"builder": "a:b", "width": 3}}, ["model.width"]),
        ({"save": {"dir": "other", "keep": 5}, "seed": 1}, ["seed", "save.keep", "save.dir"]),
    ],
)
def test_changes_are_named_with_defaults_filled_in(sections: dict[str, Any], keys: list[str]) -> None:
    assert changed_keys(job(), job(**sections)) == keys
    assert sorted(changed_keys(job(**sections), job())) == sorted(keys)


def test_equal_in_python_is_not_the_same_in_a_job() -> None:
    before, after = ({"builder": "a:b", "bias": value} for value in (1, True))
    assert changed_keys(job(model=before), job(model=after)) == ["model.bias"]


@pytest.mark.parametrize(
    ("key", "may"),
    [
        ("loop.max_steps", True), ("loop.epochs", True), ("loop.micro_batch_size", True),
        ("loop.global_batch_size", False), ("loop.eval_every", False),
        ("experts.hosts", True), ("experts.hosts.A100", True), ("experts.placement", True),
        ("experts.inflight", True), ("experts.top_k", False),
        ("save.keep", True), ("save.dir", False), ("scale.workers", True), ("telemetry.every", True),
        ("retry.rollbacks", True), ("cluster.address", True),
        ("model.width", False), ("data.path", False), ("optim.lr", False), ("seed", False), ("name", False),
        ("precision.dtype", False),
    ],
)  # fmt: skip
def test_keys_that_a_resume_may_change(key: str, may: bool) -> None:
    assert may_change_on_resume(key) is may


# ---------------------------------------------------------------- what comes later


@pytest.mark.parametrize(
    ("override", "remedy"), [("loop.global_batch_size=auto", "`raytrain tune` searches for a batch size")]
)
def test_keys_of_a_later_version_are_read_and_refused_by_name(override: str, remedy: str) -> None:
    spec = load_spec(overrides=[override]).spec
    with pytest.raises(InputError) as caught:
        refuse_later(spec, "train")
    assert caught.value.key == override.partition("=")[0]
    assert caught.value.exit_code == 2
    assert caught.value.remedy == remedy


def test_features_of_this_version_are_not_refused() -> None:
    overrides = ["scale.strategy=data_parallel", "scale.workers=2", "experts.hosts=0", "experts.inflight=2",
                 "optim.name=sgd", "data.storage=pinned", "precision.dtype=fp64", "scale.shares=auto"]  # fmt: skip
    for verb in ("train", "plan", "bench"):
        refuse_later(load_spec(overrides=overrides).spec, verb)
        refuse_later(load_spec().spec, verb)


def test_a_value_is_checked_before_the_question_whether_it_is_built() -> None:
    assert mistake(None, ["scale.workers=[4, 2]"]).key == "scale.workers"
    assert mistake(None, ["experts.hosts={A100: none}"]).key == "experts.hosts"


@pytest.mark.covers("PAR-04")
@pytest.mark.parametrize("strategy", ["pipeline_parallel", "distributed"])
def test_parallel_modes_that_do_not_exist_are_refused_by_name(strategy: str) -> None:
    error = mistake(None, [f"scale.strategy={strategy}"])
    assert (error.key, error.exit_code) == ("scale.strategy", 2)
    assert strategy in error.got
    assert all(name in error.expected for name in ("data_parallel", "fsdp", "expert_parallel"))


def test_reading_a_job_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from jobs.job.spec import load_spec; load_spec(overrides=['loop.max_steps=3']);"
        "print([name for name in ('torch', 'ray', 'pyarrow', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_collate_function_from_python_is_not_in_a_file(tmp_path: Path) -> None:
    job = {"model": {"builder": "a.b:c"}, "data": {"train": [1], "collate": len}}
    text = load_spec(mapping=job).merged_text.replace("train:", "source: 'a.b:rows' #")
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(InputError, match=r"data\.collate: got <object .*started from Python"):
        load_spec(tmp_path / "job.yaml")
