"""The verb `infer` in this process: answers in input order, resumable, and wrong input refused before anything."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file

from cluster.devices.inventory import CAPABILITIES, Device, Inventory, local_inventory
from jobs.__main__ import main
from jobs.infer import infer
from jobs.inference.compute import InferResult
from jobs.inference.layout import choose_hosts
from jobs.inference.plan import need_of, workers_of
from jobs.inference.target import Target, open_target
from raytrain.errors import InputError, RunError
from raytrain.infer.worker import InferenceWorker
from raytrain.models.gpt import gpt
from raytrain.models.mlp import mlp
from raytrain.models.weights.stored import export_weights
from raytrain.runs.folder import RunFolder

ROWS = 103
BUILDER = "raytrain.models.mlp:mlp"
SIZES = ("model.hidden=[8]", "model.num_features=4", "model.num_classes=3")


@pytest.fixture
def model(tmp_path: Path) -> torch.nn.Module:
    """An MLP whose weights are in weights.safetensors."""
    torch.manual_seed(0)
    module = mlp(hidden=[8], num_features=4, num_classes=3).module
    save_file(module.state_dict(), tmp_path / "weights.safetensors")
    return module


@pytest.fixture
def rows(tmp_path: Path) -> np.ndarray:
    """Rows of in.parquet, (ROWS, 4): `x` with an id, a label and a note beside it."""
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    write(tmp_path / "in.parquet", x)
    return x


def write(path: Path, x: np.ndarray, **more: Any) -> None:
    """Rows as Parquet with small row groups."""
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4), "note": [f"n{n}" for n in range(len(x))]}
    parquet.write_table(pa.table({**columns, **more}), path, row_group_size=10)


@pytest.fixture
def run(tmp_path: Path, model: torch.nn.Module, rows: np.ndarray) -> Callable[..., InferResult]:
    """`run(*overrides, output=...)` answers in.parquet with the model."""

    def start(*overrides: str, output: str = "out", **options: Any) -> InferResult:
        given = (*SIZES, f"model.init_from={tmp_path / 'weights.safetensors'}", "infer.unit_rows=16", "scale.threads=1")
        options.setdefault("input", str(tmp_path / "in.parquet"))
        where = str(tmp_path / output)
        return infer(BUILDER, output=where, overrides=[*given, *overrides], quiet=True, **options)

    return start


def expected(model: torch.nn.Module, x: np.ndarray) -> list[int]:
    """The most likely class of each row."""
    with torch.no_grad():
        return model(torch.from_numpy(x)).argmax(1).tolist()


def test_predictions_are_the_models_in_input_order(
    run: Callable[..., InferResult], model: torch.nn.Module, rows: np.ndarray, tmp_path: Path
) -> None:
    result = run("infer.batch_size=8", "infer.keep=[note]")
    table = result.table()
    assert table.column_names == ["id", "note", "prediction", "status", "error"]
    assert table["id"].to_pylist() == list(range(ROWS)) and table["note"][7].as_py() == "n7"
    assert table["prediction"].to_pylist() == expected(model, rows)
    assert set(table["status"].to_pylist()) == {"ok"} and set(table["error"].to_pylist()) == {None}
    assert result.status == "done" and (result.rows, result.failed) == (ROWS, 0)
    assert not (tmp_path / "out/parts").exists()


@pytest.mark.covers("INF-08", "INF-17", "INF-19")
def test_timing_manifest_and_summary_tell_what_happened(run: Callable[..., InferResult], tmp_path: Path) -> None:
    result = run("infer.batch_size=8")
    timing = parquet.read_table(tmp_path / "out/timing.parquet")
    assert timing["row"].to_pylist() == list(range(ROWS)) and min(timing["seconds"].to_pylist()) > 0
    assert timing["unit"].to_pylist() == [row // 16 for row in range(ROWS)]
    assert set(timing["batch_rows"].to_pylist()) == {8, 7}
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["rows"] == ROWS and manifest["units"] == 7 and manifest["unit_rows"] == [16] * 6 + [7]
    import hashlib

    for name, about in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert about == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seconds = timing["seconds"].to_numpy()
    assert result.summary["latency_s"]["p95"] == pytest.approx(float(np.quantile(seconds, 0.95)))
    assert result.summary["rows_per_s"] > 0 and result.summary["workers"][0]["rows"] == ROWS


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_ids_and_kept_texts_are_read_as_they_were(kind: str, run: Callable[..., InferResult], tmp_path: Path) -> None:
    table = parquet.read_table(tmp_path / "in.parquet")
    ids, notes = [f"{row:03d}" for row in range(ROWS)], ["NA", "", None, "2026-01-02", *["1.50"] * (ROWS - 4)]
    table = table.set_column(table.column_names.index("note"), "note", pa.array(notes)).append_column("key", [ids])
    parquet.write_table(table, tmp_path / "in.parquet")
    found = run("infer.id_column=key", "infer.keep=[note]", f"infer.format={kind}").table()
    assert found["id"].to_pylist() == ids and found["note"].to_pylist() == notes


@pytest.mark.covers("INF-15")
def test_an_interrupted_job_computes_only_what_is_missing(
    run: Callable[..., InferResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(output="whole").table()
    computed: list[int] = []
    original = InferenceWorker.run

    def dies(self: InferenceWorker, unit: Any) -> Any:
        if len(computed) == 3:
            raise KeyboardInterrupt
        computed.append(unit.number)
        return original(self, unit)

    monkeypatch.setattr(InferenceWorker, "run", dies)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert computed == [0, 1, 2] and not (tmp_path / "out/predictions.parquet").exists()
    computed.clear()
    monkeypatch.setattr(
        InferenceWorker, "run", lambda self, unit: (computed.append(unit.number), original(self, unit))[1]
    )
    result = run(resume=str(tmp_path / "out"))
    assert computed == [3, 4, 5, 6] and result.table().equals(whole)
    assert (tmp_path / "out/predictions.parquet").read_bytes() == (tmp_path / "whole/predictions.parquet").read_bytes()
    computed.clear()
    again = run(resume=str(tmp_path / "out"))
    assert not computed and again.rows == ROWS and again.summary == result.summary


def test_results_of_different_jobs_are_never_mixed(
    run: Callable[..., InferResult], rows: np.ndarray, tmp_path: Path, model: torch.nn.Module
) -> None:
    run()
    resume = str(tmp_path / "out")
    with pytest.raises(InputError, match=r"results of an earlier command, expected a new folder; .*--resume"):
        run()
    with pytest.raises(InputError, match=r"computed with batch_size 256, expected 4"):
        run("infer.batch_size=4", resume=resume)
    write(tmp_path / "in.parquet", rows + 1)
    with pytest.raises(InputError, match=r"computed with input"):
        run(resume=resume)
    write(tmp_path / "in.parquet", rows)
    save_file({name: value + 1 for name, value in model.state_dict().items()}, tmp_path / "weights.safetensors")
    with pytest.raises(InputError, match=r"computed with model"):
        run(resume=resume)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds thesis.txt, expected a new or empty folder"):
        run(output="full")
    assert [entry.name for entry in (tmp_path / "full").iterdir()] == ["thesis.txt"]


@pytest.mark.covers("INF-14")
def test_rows_that_fail_are_told_apart_and_too_many_fail_the_job(
    run: Callable[..., InferResult], rows: np.ndarray, model: torch.nn.Module, tmp_path: Path
) -> None:
    bad = rows.copy()
    bad[[5, 40]] = np.nan
    write(tmp_path / "bad.parquet", bad)
    result = run("infer.max_failures=0.02", input=str(tmp_path / "bad.parquet"))
    table = result.table()
    assert [row for row, status in enumerate(table["status"].to_pylist()) if status == "failed"] == [5, 40]
    assert "no finite number: nan" in table["error"][5].as_py() and table["prediction"][40].as_py() is None
    right = expected(model, rows)
    assert all(table["prediction"][row].as_py() == right[row] for row in range(ROWS) if row not in (5, 40))
    with pytest.raises(RunError, match=r"2 of 103 rows failed"):
        run("infer.max_failures=0.015", input=str(tmp_path / "bad.parquet"), output="strict")
    bad[60:] = np.nan
    write(tmp_path / "worse.parquet", bad)
    with pytest.raises(RunError, match=r"rows failed"):
        run(input=str(tmp_path / "worse.parquet"), output="worse")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_other_formats_hold_the_same_answers(run: Callable[..., InferResult], kind: str, tmp_path: Path) -> None:
    first = run().table().select(["id", "prediction"]).to_pylist()
    run(f"infer.format={kind}", output=kind)
    text = (tmp_path / kind / f"predictions.{kind}").read_text()
    if kind == "jsonl":
        found = [json.loads(line) for line in text.splitlines()]
    else:
        import csv

        found = [{key: int(row[key]) for key in ("id", "prediction")} for row in csv.DictReader(text.splitlines())]
    assert [{key: row[key] for key in ("id", "prediction")} for row in found] == first


@pytest.mark.covers("INF-07")
def test_ids_come_from_a_column_of_unique_values(
    run: Callable[..., InferResult], rows: np.ndarray, tmp_path: Path
) -> None:
    assert run("infer.id_column=note").table()["id"].to_pylist() == [f"n{row}" for row in range(ROWS)]
    write(tmp_path / "twice.parquet", rows, key=[row % 100 for row in range(ROWS)])
    with pytest.raises(InputError, match=r"infer.id_column: got the column key with 0 in rows 0 and 100"):
        run("infer.id_column=key", input=str(tmp_path / "twice.parquet"), output="twice")


def test_quality_is_computed_against_a_label(
    run: Callable[..., InferResult], rows: np.ndarray, model: torch.nn.Module, tmp_path: Path
) -> None:
    right = expected(model, rows)
    labels = [(value + (row % 4 == 0)) % 3 for row, value in enumerate(right)]
    write(tmp_path / "labelled.parquet", rows, kind=labels)
    result = run("infer.label=kind", input=str(tmp_path / "labelled.parquet"))
    assert result.summary["quality"]["accuracy"] == pytest.approx(77 / 103)
    assert result.table().column_names[1] == "kind"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("infer.keep=[nope]",), "infer.keep.*Got 'nope'"),
        (("infer.label=nope",), "infer.label: .*Got 'nope'"),
        (("model.hidden=[9]",), "model.init_from: got .*misshapen"),
        (("model.num_features=5",), "infer.input: got the column x with 4 values in each row, expected 5"),
        (("infer.max_failures=2",), "infer.max_failures"),
        (("infer.batch_size=0",), "infer.batch_size"),
        (("model.builder=raytrain.models.mlp:nope",), "nope"),
    ],
)
def test_wrong_input_is_refused_and_leaves_no_folder(
    overrides: tuple[str, ...], message: str, run: Callable[..., InferResult], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        run(*overrides)
    assert not (tmp_path / "out/predictions.parquet").exists()


def machine(*types: str) -> Inventory:
    """This machine with these GPUs."""
    devices = tuple(
        Device("cuda", f"NVIDIA {name}", 16 << 30, CAPABILITIES[name], f"GPU-{index}", index)
        for index, name in enumerate(types)
    )
    here = local_inventory()
    return replace(here, nodes=(replace(here.nodes[0], devices=devices),))


@pytest.mark.parametrize("wrong", ["model.context=0", "model.context=abc", "model.heads=0", "model.window=-1"])
def test_a_wrong_key_of_a_built_in_model_is_named_before_its_memory_is_estimated(wrong: str) -> None:
    sizes = [f"model.{name}={value}" for name, value in (("layers", 1), ("heads", 2), ("width", 16), ("context", 8))]
    with pytest.raises(InputError, match="expected an integer >= 1") as caught:
        open_target("raytrain.models.gpt:gpt", [*sizes, "model.vocab_size=256", wrong], machine())
    assert caught.value.key == wrong.partition("=")[0]


def target_on(inventory: Inventory, *overrides: str) -> Target:
    return open_target(BUILDER, [*SIZES, *overrides], inventory)


@pytest.mark.parametrize(
    ("types", "overrides", "expected"),
    [
        (("A100", "A100"), (), ("bf16", "cuda:0")),
        (("T4",), (), ("fp32", "cuda:0")),
        (("A100", "T4"), (), ("fp32", "cuda:0")),
        (("T4", "A100"), ("scale.accelerator=A100",), ("bf16", "cuda:1")),
        (("T4", "A100"), ("scale.accelerator=cuda:1", "precision.dtype=fp16"), ("fp16", "cuda:1")),
        (("A100",), ("scale.accelerator=cpu",), ("fp32", "cpu")),
        (("A100",), ("scale.mode=cpu",), ("fp32", "cpu")),
    ],
)
def test_the_gpus_that_scale_names_compute_in_a_format_they_have(
    model: torch.nn.Module, types: tuple[str, ...], overrides: tuple[str, ...], expected: tuple[str, str]
) -> None:
    found = target_on(machine(*types), *overrides).model
    assert (found.dtype, found.device) == expected


def test_hosts_need_experts_and_gpus_beside_the_workers(model: torch.nn.Module, rows: np.ndarray) -> None:
    gpus = machine("A100", "A100", "A100")
    target = target_on(gpus)
    assert [workers_of(target, 9, gpus, stages=1 + hosts, key="experts.hosts") for hosts in (0, 1, 2)] == [3, 1, 1]
    with pytest.raises(
        InputError, match=r"experts\.hosts: got 3, expected at most 2, one for each GPU but the worker's"
    ):
        workers_of(target, 9, gpus, stages=4, key="experts.hosts")
    with pytest.raises(InputError, match=r"experts\.hosts: got 2 with .*mlp, expected auto or 0, as this model has no"):
        target_on(gpus, "experts.hosts=2")
    assert choose_hosts(target, rows=1).lines() == []


def test_more_workers_than_gpus_are_refused(model: torch.nn.Module) -> None:
    inventory = machine("T4", "A100", "A100")
    assert workers_of(target_on(inventory, "scale.workers=3"), 9, inventory) == 3
    assert workers_of(target_on(inventory, "scale.accelerator=A100"), 9, inventory) == 2
    assert workers_of(target_on(inventory, "scale.workers=9", "scale.mode=cpu"), 9, inventory) == 9
    for overrides, most in (((), 3), (("scale.accelerator=T4",), 1)):
        with pytest.raises(InputError, match=f"scale.workers: got 4, expected at most {most}, one for each GPU"):
            workers_of(target_on(inventory, "scale.workers=4", *overrides), 9, inventory)
    with pytest.raises(InputError, match=r"scale\.accelerator: got .?cuda:7"):
        target_on(inventory, "scale.accelerator=cuda:7")


def test_a_cluster_holds_no_more_replicas_than_it_has_devices_for_all_their_stages(model: torch.nn.Module) -> None:
    """Two replicas that each hold one core of three would wait for each other's forever."""
    here = replace(local_inventory().nodes[0], devices=(), cpus=3)
    inventory = replace(local_inventory(), nodes=(here, replace(here, cpus=2)))
    target = target_on(inventory, "scale.workers=4", "cluster.address=10.0.0.1:6379")
    assert [workers_of(target, 9, inventory, stages=stages) for stages in (1, 2, 5)] == [4, 2, 1]
    assert [workers_of(target_on(inventory, *more), 9, inventory, stages=stages) for more, stages in (
        (("scale.threads=2", "scale.workers=4", "cluster.address=10.0.0.1:6379"), 2), (("scale.workers=4",), 2),
    )] == [1, 4], "each process has its threads on one node; our own Ray counts no cores"  # fmt: skip
    assert need_of(target_on(inventory, "scale.threads=2"), 2, key="infer.stages").each == {"CPU": 1}
    gpus = machine("A100", "A100", "A100")
    gpus = replace(gpus, nodes=(replace(gpus.nodes[0], cpus=3),))
    on_gpus = target_on(gpus, "scale.workers=2", "cluster.address=10.0.0.1:6379").on(gpus)
    assert [workers_of(on_gpus, 9, gpus, stages=stages) for stages in (1, 2)] == [2, 1]


@pytest.mark.covers("INF-22")
def test_a_dry_run_prints_the_plan_and_writes_nothing(
    rows: np.ndarray, model: torch.nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["infer", BUILDER, *SIZES, f"infer.input={tmp_path / 'in.parquet'}", f"infer.output={tmp_path / 'out'}",
                 "infer.max_samples=5", "--dry-run"]  # fmt: skip
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0 and not (tmp_path / "out").exists()
    assert "5 rows in 1 unit of 5" in capsys.readouterr().out


@pytest.mark.covers("PERF-37")
@pytest.mark.parametrize(
    ("size", "workers", "said"),
    [
        (5, "16 workers", "21 units in 2 rounds: at most 10.5 times the speed of one worker (66% of linear)"),
        (1, "16 workers", "103 units in 7 rounds: at most 14.7 times the speed of one worker (92% of linear)"),
        (16, "7 workers", "7 units in 1 round: at most 7 times the speed of one worker (100% of linear)"),
    ],
)
def test_a_plan_for_sixteen_workers_says_what_they_can_bring_at_most(
    rows: np.ndarray,
    model: torch.nn.Module,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    size: int,
    workers: str,
    said: str,
) -> None:
    given = ["infer", BUILDER, *SIZES, f"infer.input={tmp_path / 'in.parquet'}", f"infer.output={tmp_path / 'out'}",
             "scale.workers=16", f"infer.unit_rows={size}", "--dry-run"]  # fmt: skip
    with pytest.raises(SystemExit):
        main(given)
    lines = capsys.readouterr().out.splitlines()
    assert f"schedule: {said}, where units take equally long" in lines
    assert any(line.startswith(f"workers: {workers} with ") for line in lines)


def test_prompts_are_answered_by_a_language_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = gpt(layers=1, heads=2, width=16, context=32, vocab_size=256).module
    export_weights(module.state_dict(), str(tmp_path / "w.safetensors"))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"q": f"why {n}", "n": n}) + "\n" for n in range(20)))
    job = {
        "model": {"builder": "raytrain.models.gpt:gpt", "layers": 1, "heads": 2, "width": 16, "context": 32,
                  "init_from": str(tmp_path / "w.safetensors")},
        "data": {"source": "stdlib", "max_bytes": 10000},
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(json.dumps(job))

    def answers(output: str, *more: str) -> list[str]:
        given = ["infer.max_new_tokens=8", "infer.template=Q {n}: {q}", "infer.batch_size=4", *more]
        result = infer(tmp_path / "job.yaml", input=str(tmp_path / "in.jsonl"), output=str(tmp_path / output),
                       overrides=given, quiet=True)  # fmt: skip
        return result.table()["prediction"].to_pylist()

    greedy = answers("a")
    assert len(greedy) == 20 and answers("b", "infer.unit_rows=5") == greedy
    drawn = answers("c", "infer.temperature=1.0")
    assert drawn != greedy and answers("d", "infer.temperature=1.0", "infer.unit_rows=5") == drawn
    timing = parquet.read_table(tmp_path / "a/timing.parquet")
    assert timing["tokens"].to_pylist() == [8] * 20
    with pytest.raises(InputError, match=r"infer.template: got the field \{question\}"):
        answers("e", "infer.template=A {question}")
    for form in ("{n:03d}", "{n!r}"):
        with pytest.raises(
            InputError, match=re.escape(f"infer.template: got {form}, expected {{n}}: a value is written")
        ):
            answers("e", f"infer.template=Q {form}: {{q}}")


def test_the_newest_run_that_has_no_weights_is_said_to_be_the_one_that_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create("runs", "a", job={"model": {"builder": BUILDER}, "data": {"source": "csv", "path": "x.csv"}})
    for given in (None, "latest"):
        with pytest.raises(InputError, match="infer: got no RUN, and the newest run has no weights") as refused:
            open_target(given, [], machine())
        assert os.path.basename(run.path) in refused.value.got and "name a run" in refused.value.remedy
    with pytest.raises(InputError, match="without a complete checkpoint"):
        open_target(run.path, [], machine())
