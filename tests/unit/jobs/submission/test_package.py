"""The package of a working directory: what is left out, its limit, and files that a job needs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.__main__ import main
from jobs.submission import package as packages
from jobs.submission.package import pack
from jobs.submission.request import request_of
from raytrain.errors import InputError


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
    assert "limit is 512 MiB" in package.text and "left out: sub/weights.bin" in package.text
    assert capfd.readouterr().err == ""


def test_a_package_above_the_limit_names_its_largest_entries(folder: Path, tmp_path: Path) -> None:
    (folder / "sub" / "a.bin").write_bytes(os.urandom(3 << 20))
    (folder / "b.bin").write_bytes(os.urandom(2 << 20))
    assert pack(folder, tmp_path / "fits.zip", limit=6 << 20).bytes < 6 << 20
    with pytest.raises(InputError) as refused:
        pack(folder, tmp_path / "large.zip", limit=4 << 20)
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
            request.check_package(package, folder)
    request = request_of("train", main.commands["train"], submitted(folder))
    request.check_package(pack(folder, tmp_path / "good.zip"), folder)
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
