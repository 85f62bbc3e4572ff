"""The package of a working directory: what is left out, its limit, and files that a job needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.__main__ import main
from jobs.job.spec import load_spec
from jobs.submission import request as packages
from jobs.submission.request import check_package, pack, request_of
from jobs.submission.server import JobServer
from raytrain.checkpoint.reader import FORMAT
from raytrain.checkpoint.snapshot import Snapshot
from raytrain.checkpoint.writer import write_checkpoint
from raytrain.errors import InputError
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import open_store


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with code, and with what does not belong to a job."""
    here = tmp_path / "work"
    for name in (
        "code.py", "sub/more.py", "runs/old/events.jsonl", "sub/runs/data.txt", ".git/config", "__pycache__/code.pyc",
        "my_env/pyvenv.cfg", "my_env/bin/python", "node_modules/x.js", "ignored.txt", "ours.txt",
    ):  # fmt: skip
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (here / ".gitignore").write_text("ignored.txt\n")
    (here / ".rayignore").write_text("ours.txt\n")
    monkeypatch.chdir(here)
    return here


def test_only_what_a_job_needs_is_packed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "LARGE_FILE", 1000)
    (folder / "sub" / "weights.bin").write_bytes(os.urandom(1001))
    (folder / "sub" / "small.bin").write_bytes(os.urandom(1000))
    package = pack(folder, tmp_path / "all.zip")
    assert package.names - {".gitignore", ".rayignore"} == {
        "code.py", "sub/more.py", "sub/runs/data.txt", "sub/small.bin"
    }  # fmt: skip
    assert package.large == {"sub/weights.bin": 1001}
    assert "limit is 100 MiB" in package.text and "left out: sub/weights.bin" in package.text
    assert capfd.readouterr().err == ""


def test_runs_in_any_folder_are_left_out_with_the_link_to_the_latest(folder: Path, tmp_path: Path) -> None:
    """Else each submission would carry the checkpoints of all before it."""
    for _ in range(2):
        run = RunFolder.create(str(folder / "shared" / "results"), "job")
        run.append_event({"kind": "driver_start"})
        run.next_attempt({"host": "a", "pid": 1, "start": 1.0})
        run.write_text("checkpoints/step_00000010/model.safetensors", "weights")
    (folder / "shared" / "rows.csv").write_text("a\n")
    (folder / "sub" / "events.jsonl").write_text("somebody's own\n")
    assert (folder / "shared" / "results" / "latest").is_symlink()
    names = pack(folder, tmp_path / "all.zip").names
    assert {name for name in names if name.startswith("shared/")} == {"shared/rows.csv"}
    assert "sub/events.jsonl" in names


def test_a_package_above_the_limit_names_its_largest_entries(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sub" / "a.bin").write_bytes(os.urandom(3 << 20))
    (folder / "b.bin").write_bytes(os.urandom(2 << 20))
    monkeypatch.setattr("ray._private.ray_constants.DASHBOARD_CLIENT_MAX_SIZE", 6 << 20)
    assert "5.0 MiB; Ray's limit is 6 MiB" in pack(folder, tmp_path / "fits.zip").text
    monkeypatch.setattr("ray._private.ray_constants.DASHBOARD_CLIENT_MAX_SIZE", 4 << 20)
    with pytest.raises(InputError) as refused:
        pack(folder, tmp_path / "large.zip")
    assert "the largest entries are sub/ (3.0 MiB), b.bin (2.0 MiB)" in refused.value.got
    assert refused.value.expected == "less than 4 MiB, the limit of Ray"


JOB = "model: {{builder: 'raytrain.models.gpt:gpt', layers: 1, heads: 1, width: 8, context: 8}}\n"
JOB += "data: {{source: text, path: {path}}}\nsave: {{dir: {save}}}\n"


def submitted(folder: Path, *, path: str = "text.txt", save: str = "/shared/runs") -> list[str]:
    """A JOB.yaml and the arguments that train it."""
    (folder / "job.yaml").write_text(JOB.format(path=path, save=save))
    return ["job.yaml", "loop.max_steps=3"]


def test_data_that_is_not_in_the_package_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("text.txt", "ignored.txt", "big.txt"):
        (folder / name).write_text("text " * (100 if name != "big.txt" else 1000))
    monkeypatch.setattr(packages, "LARGE_FILE", 2000)
    for name, why in (("ignored.txt", "it is ignored"), ("big.txt", "MiB are too much")):
        request = request_of("train", main.commands["train"], submitted(folder, path=name))
        package = pack(folder, tmp_path / f"{name}.zip")
        with pytest.raises(InputError, match=f"data.path: got {name}, .*{why}"):
            check_package(request, package, folder)
    request = request_of("train", main.commands["train"], submitted(folder))
    package = pack(folder, tmp_path / "good.zip")
    check_package(request, package, folder)
    for path, named in (("texts.txt", f"{folder}/texts.txt"), (f"[text.txt, {folder}/b.txt]", f"{folder}/b.txt")):
        wrong = request_of("train", main.commands["train"], submitted(folder, path=path))
        with pytest.raises(InputError, match=rf"data\.path.*: got {named}, which does not exist, expected a file in"):
            check_package(wrong, package, folder)
    elsewhere = request_of("train", main.commands["train"], submitted(folder, path="/shared/texts.txt"))
    check_package(elsewhere, package, folder)
    assert request.entrypoint == "python -m jobs train job.yaml loop.max_steps=3"
    assert request.record["save_dir"] == "/shared/runs" and request.record["stop_grace_s"] == 60.0


def test_arguments_are_checked_as_the_verb_would(folder: Path) -> None:
    (folder / "text.txt").write_text("text " * 100)
    arguments = submitted(folder)
    absolute = request_of("train", main.commands["train"], [str(folder / "job.yaml"), "name=a-b"])
    assert absolute.arguments == ("job.yaml", "name=a-b")
    cases = (
        ("train", [*arguments, "save.dir=here"], r"save\.dir: got here, .* which Ray deletes"),
        ("train", [*arguments, "--resume", "runs/x"], r"--resume: got runs/x"),
        ("train", [*arguments, "loop.max_stps=1"], r"loop\.max_stps"),
        ("train", [str(folder.parent / "other.yaml")], r"other\.yaml"),
        ("bench", ["startup"], r"--out: got nothing"),
        ("bench", ["startup", "--out", "x.json"], r"--out: got x\.json"),
        ("export", ["runs/latest"], r"RUN: got runs/latest"),
        ("report", [], r"RUN_DIR: got runs/latest"),
        ("infer", ["/shared/runs/a"], r"infer\.output: got nothing"),
        ("infer", ["/shared/runs/a", "infer.output=out"], r"infer\.output: got out"),
    )
    for verb, given, expected in cases:
        with pytest.raises(InputError, match=expected):
            request_of(verb, main.commands[verb], given)
    accepted = request_of("infer", main.commands["infer"], ["/shared/runs/a", "infer.output=s3://bucket/out"])
    assert accepted.entrypoint == "python -m jobs infer /shared/runs/a infer.output=s3://bucket/out"
    quoted = request_of("train", main.commands["train"], [*arguments, "tune.space={loop.max_steps: [1, 2]}"])
    assert quoted.entrypoint.endswith("'tune.space={loop.max_steps: [1, 2]}'")


def resumable(folder: Path, monkeypatch: pytest.MonkeyPatch, *, steps: tuple[int, ...] = (3,)) -> Path:
    """A run that was submitted from `folder` and has ended, with a checkpoint for each of these steps."""
    monkeypatch.setattr(RunFolder, "alive", lambda run: None)  # its driver would be this process
    (folder / "text.txt").write_text("text " * 100)
    submitted(folder, save=str(folder.parent / "shared"))
    run = RunFolder.create(str(folder.parent / "shared"), "run", job=dict(load_spec(folder / "job.yaml").mapping))
    for step in steps:
        snapshot = Snapshot(step, {"model": {"w": torch.zeros(3)}}, {})
        store = open_store(run.checkpoint_dir(step))
        store.make_dir("")
        write_checkpoint(store, snapshot, {"format": FORMAT, "step": step})
    return Path(run.path)


def test_a_resume_is_checked_before_the_upload_where_the_run_can_be_seen(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = main.commands["train"]
    run = resumable(folder, monkeypatch)
    request = request_of("train", train, ["--resume", str(run), "retry.stop_grace_s=7"])
    assert request.entrypoint == f"python -m jobs train --resume {run} retry.stop_grace_s=7"
    record = request.record
    assert (record["name"], record["save_dir"], record["stop_grace_s"]) == ("run", str(run.parent), 7.0)
    at_once = request_of("train", train, ["--resume", str(run), "retry.stop_grace_s=0"])
    assert at_once.record["stop_grace_s"] == 0.0, "no wait, and not the default"
    (folder / ".gitignore").write_text("text.txt\n")
    with pytest.raises(InputError, match=r"data\.path: got text\.txt, which is not in the package"):
        check_package(request, pack(folder, tmp_path / "all.zip"), folder)

    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    (other / "notes.txt").write_text("no run")
    for where, expected in ((empty, "an empty folder"), (other, "which has no job.json")):
        with pytest.raises(InputError, match=f"--resume: got {where}, {expected}"):
            request_of("train", train, ["--resume", str(where)])
    with pytest.raises(InputError, match=r"model\.width: got the changed value"):
        request_of("train", train, ["--resume", str(run), "model.width=16"])
    with pytest.raises(InputError, match=r"--resume: got \S+, which is not a search folder"):
        request_of("tune", main.commands["tune"], ["--resume", str(other)])

    not_here = request_of("train", train, ["--resume", "/on/the/cluster/runs/x"])
    assert not_here.spec is None and not_here.record["save_dir"] == "/on/the/cluster/runs"


def test_a_resume_from_damaged_checkpoints_is_refused_and_one_before_the_first_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = main.commands["train"]
    run = resumable(folder, monkeypatch, steps=(3, 5))
    for name in ("step_00000005", "step_00000003"):
        assert request_of("train", train, ["--resume", str(run)]).spec is not None
        (run / "checkpoints" / name / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"checkpoints are all damaged \(\S+step_00000005/manifest\.json: damaged"):
        request_of("train", train, ["--resume", str(run)])
    for name in ("step_00000005", "step_00000003"):
        (run / "checkpoints" / name / "COMPLETE").unlink()
    assert request_of("train", train, ["--resume", str(run)]).spec is not None, "it begins at step 0"


def test_an_upload_that_the_server_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(server: JobServer, env: dict[str, Any]) -> None:
        raise RuntimeError("Request failed with status code 413:\nMaximum request body size exceeded.")

    monkeypatch.setattr(JobServer, "_upload_working_dir_if_needed", refuse)
    server = JobServer.__new__(JobServer)
    server._default_metadata = {}
    with pytest.raises(InputError, match=r"job: got Maximum request body size exceeded"):
        server.submit("python -m jobs check", job_id="mine", runtime_env={"working_dir": "code.zip"})
