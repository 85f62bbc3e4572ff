"""What an inference job does where something is wrong: one clear message, nothing lost, nothing half-written."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jobs.infer import infer
from jobs.inference.compute import InferResult
from raytrain.errors import InputError, RunError
from raytrain.infer.worker import InferenceWorker

ROWS = 103
GUEST = """
import torch
from torch import nn


class Sums(nn.Module):
    def __init__(self, slow=None):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x):
        if not torch.isfinite(x).all():
            raise ValueError("a value is not finite")
        return (x * self.weight).sum(1)


def build():
    return Sums()


def broken():
    raise KeyError("no such part")
"""


@pytest.fixture(autouse=True)
def guest(tmp_path: Path) -> Iterator[None]:
    """`sums_guest:build` is importable, from the folder of the test."""
    (tmp_path / "sums_guest.py").write_text(GUEST)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.syspath_prepend(str(tmp_path))
        yield
    sys.modules.pop("sums_guest", None)


@pytest.fixture
def x(tmp_path: Path) -> np.ndarray:
    """The rows of in.parquet, (ROWS, 4)."""
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    write(tmp_path / "in.parquet", x)
    return x


def table_of(x: np.ndarray, **more: Any) -> pa.Table:
    """The rows as the column `x`."""
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4), **more})


def write(path: Path, x: np.ndarray, **more: Any) -> None:
    """The rows as Parquet with small row groups."""
    parquet.write_table(table_of(x, **more), path, row_group_size=10)


def run(*overrides: str, output: str = "out", input: Any = "in.parquet", **options: Any) -> InferResult:
    """Answer rows with the guest's sums."""
    given = ["infer.unit_rows=16", "infer.batch_size=8", "scale.threads=1", *overrides]
    return infer("sums_guest:build", input=input, output=output, overrides=given, quiet=True, **options)


def left(folder: str = "out") -> list[str]:
    """Files below an output folder."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def dies_after(units: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The next job ends with an error after so many units."""
    computed, original = [], InferenceWorker.run

    def dies(self: InferenceWorker, unit: Any) -> Any:
        if len(computed) == units:
            raise error
        computed.append(unit.number)
        return original(self, unit)

    monkeypatch.setattr(InferenceWorker, "run", dies)


def test_rows_computed_again_after_an_error_are_marked_and_differ_by_rounding_only(x: np.ndarray) -> None:
    clean = run(output="clean")
    bad = x.copy()
    bad[[5, 40]] = [-3e38, 0, 0, 3e38]  # the output is infinite, which only the model shows
    write(Path("bad.parquet"), bad)
    result = run("infer.max_failures=0.1", input="bad.parquet")
    table, timing = result.table(), parquet.read_table("out/timing.parquet")
    assert [row for row, one in enumerate(table["status"].to_pylist()) if one == "failed"] == [5, 40]
    again = [row for row, one in enumerate(timing["again"].to_pylist()) if one]
    assert again == [*range(8), *range(40, 48)] and result.summary["computed_again"] == len(again)
    right, found = (one.table()["prediction"].to_pylist() for one in (clean, result))
    assert all(found[row] == right[row] for row in range(ROWS) if row not in again), "bit for bit"
    kept = [row for row in again if row not in (5, 40)]
    assert [found[row] for row in kept] == pytest.approx([right[row] for row in kept], abs=1e-5)
    assert right == pytest.approx((x @ np.linspace(-1, 1, 4, dtype=np.float32)).tolist(), abs=1e-5)


def test_an_output_that_a_live_command_writes_is_refused(x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(output="whole")
    dies_after(3, monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.undo()
    assert not Path("out/attempts").exists(), "an interrupted command gives its claim back"
    live = subprocess.Popen([sys.executable, "-c", textwrap.dedent("""
        import sys
        from raytrain.runs.folder import Attempts, this_process
        from raytrain.runs.storage import open_store
        Attempts(open_store("out")).next_attempt(this_process())
        print("claimed", flush=True)
        sys.stdin.read()
    """)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert live.stdout is not None and live.stdout.readline() == b"claimed\n"
        before = left()
        for resume in ("out", None):
            with pytest.raises(
                InputError, match=rf"to which process {live.pid} on .* writes, expected .*; wait for its"
            ):
                run(resume=resume)
        assert left() == before
    finally:
        live.kill()
        live.communicate()
    assert run(resume="out").table().equals(whole.table()), "a dead command holds nothing"
    assert left() == [
        "job.json", "manifest.json", "predictions.parquet", "report/report.html", "summary.json", "timing.parquet",
    ]  # fmt: skip


@pytest.mark.parametrize(("limit", "file"), [(3_000, "unit-000000.parquet"), (6_500, "timing.parquet")])
def test_a_full_disk_is_named_and_loses_nothing(x: np.ndarray, limit: int, file: str) -> None:
    whole = run(output="whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(
            RunError, match=rf"/{file}: cannot be written: .*room or point infer.output at a larger disk"
        ):
            run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept = left() if Path("out").exists() else []
    assert not [name for name in kept if "tmp" in name or name.startswith(("predictions", "timing", "manifest"))]
    computed = [name for name in kept if name.startswith("parts/")]
    assert len(computed) == (7 if limit > 5_000 else 0)
    assert run(resume="out" if computed else None).table().equals(whole.table())


def test_a_full_disk_while_input_is_converted_leaves_no_folder() -> None:
    Path("in.jsonl").write_text("".join(json.dumps({"x": [row / 7] * 4}) + "\n" for row in range(5000)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        with pytest.raises(RunError, match=r"/input-00000-.*cannot be written: .*infer.output"):
            run(input="in.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (("infer.label=nope",), InputError, "infer.label: got 'nope'"),
        (("infer.id_column=twice",), InputError, "infer.id_column: got the column twice with 0 in rows 0 and 50"),
        (("infer.keep=[status]",), InputError, "infer.keep: got status, a column that raytrain writes"),
        (("model.builder=sums_guest:broken",), KeyError, "no such part"),
        (("model.init_from=other.safetensors",), InputError, "model.init_from"),
    ],
)
def test_what_is_wrong_before_the_first_row_leaves_no_folder(
    x: np.ndarray, overrides: tuple[str, ...], kind: type[Exception], message: str
) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(5)}, "other.safetensors")
    lines = [json.dumps({"x": row.tolist(), "twice": number % 50, "status": 1}) for number, row in enumerate(x)]
    Path("in.jsonl").write_text("\n".join(lines))
    with pytest.raises(kind, match=message):
        run(*overrides, input="in.jsonl")
    assert not Path("out").exists()


@pytest.mark.covers("INF-06", "INF-07", "SRC-15")
def test_the_merge_refuses_parts_that_are_missing_or_of_another_job_and_lists_them(
    x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(output="whole")
    monkeypatch.setattr("jobs.infer.merge", _stopped)
    for output, more in (("out", ()), ("other", ("infer.batch_size=4",))):
        with pytest.raises(KeyboardInterrupt):
            run(*more, output=output)
    monkeypatch.undo()
    parts = [f"parts/unit-00000{unit}.parquet" for unit in range(7)]
    assert [name for name in left() if name.startswith("parts")] == parts, "each complete, none with another name"
    data = Path("out", parts[2]).read_bytes()
    Path("out", parts[2]).write_bytes(Path("other", parts[2]).read_bytes())
    with pytest.raises(InputError, match=r"unit-000002.parquet, which another job wrote, .*delete it"):
        run(resume="out")
    Path("out", parts[2]).write_bytes(Path("out", parts[3]).read_bytes())
    with pytest.raises(InputError, match=r"unit-000002.parquet with rows 48 to 64, expected rows 32 to 48"):
        run(resume="out")
    Path("out", parts[2]).write_bytes(data)
    original = InferenceWorker.run

    def loses(self: InferenceWorker, unit: Any) -> Any:
        for number in (1, 4):
            Path("out", parts[number]).unlink()
        return original(self, unit)

    Path("out", parts[6]).unlink()
    monkeypatch.setattr(InferenceWorker, "run", loses)
    with pytest.raises(RunError, match=r"2 files in .* are missing: unit-000001.parquet, unit-000004.parquet"):
        run(resume="out")
    monkeypatch.undo()
    assert not [name for name in left() if name.startswith("predictions")]
    foreign = Path("out/parts/unit-000007.parquet")
    foreign.write_bytes(data)
    with pytest.raises(RunError, match=r"1 files in .* are of no unit of this input: unit-000007.parquet"):
        run(resume="out")
    foreign.unlink()
    assert run(resume="out").table().equals(whole.table())


def _stopped(*arguments: Any, **more: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.covers("SRC-16")
def test_a_json_file_is_divided_into_shards_that_the_manifest_lists(
    x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("unified_val.json").write_text(json.dumps([{"x": row.tolist()} for row in x]))
    monkeypatch.setattr("jobs.infer.merge", _stopped)
    with pytest.raises(KeyboardInterrupt):
        run(input="unified_val.json")
    monkeypatch.undo()
    shards = [parquet.read_table(path) for path in sorted(Path("out/parts").glob("*.parquet"))]
    result = run(input="unified_val.json", resume="out")
    manifest = json.loads(Path("out/manifest.json").read_text())
    assert manifest["unit_rows"] == [shard.num_rows for shard in shards] == [16] * 6 + [7]
    assert [row for shard in shards for row in shard["id"].to_pylist()] == list(range(ROWS))
    assert [value for shard in shards for value in shard["prediction"].to_pylist()] == (
        result.table()["prediction"].to_pylist()
    )
    assert manifest["rows"] == ROWS and len(manifest["job"]["input"]) == 1


def test_input_that_changes_while_it_is_computed_is_not_merged(x: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    original = InferenceWorker.run

    def changes(self: InferenceWorker, unit: Any) -> Any:
        if unit.number == 6:
            write(Path("in.parquet"), x + 1)
        return original(self, unit)

    monkeypatch.setattr(InferenceWorker, "run", changes)
    with pytest.raises(RunError, match=r"in.parquet changed while its rows were computed"):
        run()
    assert not Path("out/predictions.parquet").exists()


def test_an_unreadable_row_is_named(x: np.ndarray) -> None:
    data = bytearray(Path("in.parquet").read_bytes())
    at = parquet.ParquetFile("in.parquet").metadata.row_group(4).column(0).data_page_offset
    data[at : at + 60] = b"\xff" * 60
    Path("in.parquet").write_bytes(bytes(data))
    with pytest.raises(InputError, match=r"infer.input: got cannot read .*in.parquet: .*expected a readable file"):
        run()
    assert len([name for name in left() if name.startswith("parts")]) == 2, "what is complete is kept"


def test_arrow_tables_are_input_and_predictions_are_read_in_every_format(x: np.ndarray) -> None:
    files = run(output="files")
    for kind in ("parquet", "csv", "jsonl"):
        result = run(f"infer.format={kind}", input=table_of(x), output=kind)
        assert result.predictions.endswith(f"predictions.{kind}")
        assert result.table()["id"].to_pylist() == list(range(ROWS))
        assert result.table()["prediction"].to_pylist() == files.table()["prediction"].to_pylist()
        assert sum(batch.num_rows for batch in result.batches()) == ROWS
    with pytest.raises(InputError, match=r"computed with input"):
        run(input=table_of(x + 1), resume="parquet")


def test_text_input_is_converted_outside_of_the_output_for_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    from jobs.__main__ import main

    Path("in.jsonl").write_text('{"x": [1, 2, 3, 4]}\n' * 30)
    with pytest.raises(SystemExit):
        main(["infer", "sums_guest:build", "infer.input=in.jsonl", "infer.output=out", "--dry-run"])
    assert "30 rows" in capsys.readouterr().out and not Path("out").exists()


@pytest.mark.covers("INF-09", "INF-10", "SRC-14")
def test_each_format_gives_the_same_ids_and_the_limit_comes_before_the_units(
    x: np.ndarray, run_formats: Callable[[str], str]
) -> None:
    found = {}
    for kind in ("csv", "jsonl", "json"):
        for size in (4, 16):
            result = infer(
                "sums_guest:build", input=run_formats(kind), output=f"{kind}-{size}", quiet=True,
                overrides=["model.builder=sums_guest:named", "infer.max_samples=37", f"infer.unit_rows={size}",
                           "infer.id_column=id", "infer.batch_size=4"],
            )  # fmt: skip
            table = result.table()
            found[kind, size] = table["id"].to_pylist(), table["prediction"].to_pylist()
    assert len({str(one) for one in found.values()}) == 1
    assert found["csv", 4][0] == [f"q{row}" for row in range(37)]


@pytest.fixture
def run_formats() -> Callable[[str], str]:
    """Writes 50 rows in a format; returns the file."""
    Path("sums_guest.py").write_text(
        GUEST
        + textwrap.dedent("""
        class Named(Sums):
            def forward(self, a):
                return a.reshape(len(a)).float() * 2


        def named():
            return Named()
    """)
    )
    rows = [{"id": f"q{row}", "a": row / 4} for row in range(50)]

    def written(kind: str) -> str:
        path = Path(f"rows.{kind}")
        if kind == "csv":
            path.write_text("id,a\n" + "".join(f"{row['id']},{row['a']}\n" for row in rows))
        elif kind == "json":
            path.write_text(json.dumps(rows))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return written


@pytest.mark.covers("INF-11", "CLI-20")
def test_a_strategy_is_a_named_template_and_an_unknown_one_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    from jobs.__main__ import main

    Path("in.jsonl").write_text("".join(json.dumps({"q": f"why {row}"}) + "\n" for row in range(6)))
    job = {
        "model": {"builder": "raytrain.models.gpt:gpt", "layers": 1, "heads": 2, "width": 16, "context": 64},
        "data": {"source": "stdlib", "max_bytes": 10000},
        "infer": {"input": "in.jsonl", "max_new_tokens": 4,
                  "templates": {"short": "Q {q}", "combined_optimized": "Answer the question: {q}"}},
    }  # fmt: skip
    Path("job.yaml").write_text(json.dumps(job))

    def answers(output: str, *more: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as stop:
            main(["infer", "job.yaml", f"infer.output={output}", *more])
        return stop.value.code, capsys.readouterr().err

    code, said = answers("none", "--strategy", "combined_optimised")
    assert code == 2 and "Got combined_optimised, expected one of infer.templates (short, combined_optimized)" in said
    assert "did you mean combined_optimized" in said and not Path("none").exists()
    for name, text in job["infer"]["templates"].items():
        assert answers(name, "--strategy", name)[0] == 0
        assert answers(f"{name}-written", f"infer.template={text}")[0] == 0
        first, second = (
            parquet.read_table(f"{one}/predictions.parquet")["prediction"].to_pylist()
            for one in (name, f"{name}-written")
        )
        assert first == second and len(first) == 6


@pytest.mark.parametrize("split", [1, 2], ids=["one file", "two files"])
def test_carried_json_values_are_written_to_jsonl_as_they_stood(split: int) -> None:
    carried = [
        {"o": {"a": 1}, "n": 2, "m": [{"role": "user"}], "w": {"k": 2**70}},
        {"o": {"b": 2.5, "c": None}, "n": 1.5, "m": [{"role": "tool", "call": [1, 2.0]}], "w": {"k": 1}},
        {"o": None, "n": 3, "m": [], "w": None}, {"n": 0, "m": None},
        {"o": {"a": 7}, "n": 4, "m": [{"role": "a"}], "w": {"k": 5}},
    ]  # fmt: skip
    lines = [json.dumps({"x": [row, 1, 2, 3], **one}) + "\n" for row, one in enumerate(carried)]
    Path("in").mkdir()
    for number in range(split):  # the last file's own values all have the same keys
        some = lines[number * 4 :] if number else lines[: 4 if split > 1 else 5]
        Path(f"in/{number}.jsonl").write_text("".join(some), "utf-8-sig")
    keep = ["infer.keep=[n,o,m,w]", "infer.unit_rows=2"]
    result = run(*keep, "infer.format=jsonl", input="in")
    written = [json.loads(line) for line in Path(result.predictions).read_text().splitlines()]
    expected = [{name: one.get(name) for name in ("n", "o", "m", "w")} for one in carried]
    assert [json.dumps({name: row[name] for name in expected[0]}) for row in written] == list(map(json.dumps, expected))
    assert set(written[0]) == {"id", "n", "o", "m", "w", "prediction", "status", "error"}
    assert result.table()["prediction"].to_pylist() == [row["prediction"] for row in written]
    assert set(result.table().column_names) == set(written[0])
    table = run(*keep, input="in", output="as_parquet").table()
    assert table.column_names[:5] == ["id", "n", "o", "m", "w"] and table["n"].to_pylist() == [2.0, 1.5, 3.0, 0.0, 4.0]


def test_a_column_that_a_later_file_lacks_is_named_with_that_file() -> None:
    Path("in").mkdir()
    Path("in/a.csv").write_text("x,k\n1,2\n")
    Path("in/b.csv").write_text("x\n1\n")
    with pytest.raises(InputError, match=r"got the columns x in \S*in/b\.csv, expected x, k, as in \S*in/a\.csv"):
        run(input="in")
