"""The command line in this process: which exit code, which words. No Ray is started by any of these."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jobs.__main__ import main, split_arguments
from jobs.bench.harness.options import BENCHES
from jobs.driver.signals import Interrupted
from jobs.job.spec import RECIPES
from raytrain.errors import InputError, RunError


def run(*arguments: str) -> Result:
    """What the command would print and exit with."""
    return CliRunner().invoke(main, list(arguments))


def test_the_version_is_the_packages() -> None:
    done = run("--version")
    assert done.exit_code == 0 and done.output.strip() == f"raytrain, version {version('raytrain')}"


def test_help_of_bench_lists_the_benches_in_a_line_each_and_that_of_a_bench_its_keys() -> None:
    every, one = run("bench", "--help"), run("bench", "loop", "--help")
    assert every.exit_code == one.exit_code == 0
    lines = every.output.splitlines()
    for name in BENCHES:
        assert [len(line) <= 80 for line in lines if line.startswith(f"  {name} ")] == [True], name
    assert len(lines) < 50 and "threads of one process" not in every.output
    assert "`raytrain bench NAME --help`" in every.output
    assert "threads of one process, the same for every arm" in one.output and 'threads = "auto"' in one.output
    assert " loop: " in one.output and " placement " not in one.output
    assert run("bench", "loops", "--help").exit_code == 2


def test_no_summary_of_a_verb_is_cut_in_a_terminal_of_80_columns() -> None:
    for group in ((), ("submit",)):
        done = CliRunner().invoke(main, [*group, "--help"], env={"COLUMNS": "80"}, terminal_width=80)
        assert done.exit_code == 0 and "..." not in done.output.partition("Commands:")[2], done.output


def test_help_names_every_verb() -> None:
    done = run("-h")
    for verb in ("train", "plan", "report", "tune", "infer", "check", "submit"):
        assert f"\n  {verb} " in done.output, verb


def test_arguments_are_a_file_and_overrides_in_any_order() -> None:
    assert split_arguments(("a.b=c", "job.yaml", "d=e=f")) == (Path("job.yaml"), ["a.b=c", "d=e=f"])
    assert split_arguments(()) == (None, [])
    with pytest.raises(InputError, match="got one two, expected at most one JOB"):
        split_arguments(("one", "two"))
    for key in ("optim.lr", "seed", "data.source"):
        with pytest.raises(InputError, match=f"{key}: got a key without a value, expected {key}=VALUE"):
            split_arguments(("job.yaml", key))
    assert split_arguments(("data.yaml",)) == (Path("data.yaml"), [])


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (RunError("the disk is full"), 1, "error: the disk is full"),
        (InputError("data.path", got="x", expected="y"), 2, "error: data.path: got x, expected y"),
        (Interrupted("SIGTERM"), 130, "interrupted"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(15), 130, "interrupted"),  # a SIGTERM while `ray.init` runs
    ],
)
def test_each_kind_of_end_has_its_exit_code(
    raised: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr("jobs.train.run_train", fails)
    done = run("train")
    assert done.exit_code == code and words in done.stderr and done.stdout == "" and "Traceback" not in done.stderr


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("failed", 1), ("interrupted", 130)])
def test_the_status_of_a_run_is_the_exit_code(status: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def trains(path: Any, overrides: Any, **options: Any) -> Any:
        seen.update(path=path, overrides=overrides, **options)
        return type("Result", (), {"status": status})()

    monkeypatch.setattr("jobs.train.run_train", trains)
    monkeypatch.setattr("os._exit", sys.exit)
    assert run("train", "job.yaml", "seed=1", "--resume", "there", "-v").exit_code == code
    assert (seen["path"], seen["overrides"]) == (Path("job.yaml"), ["seed=1"])
    assert (seen["resume"], seen["verbose"]) == ("there", True)


def test_a_recipe_is_found_by_name_and_a_file_of_that_name_has_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("input.txt").write_text("to be or not to be " * 200)
    Path("shakespeare").mkdir()  # a folder of that name is no job
    named = run("plan", "shakespeare", "data.path=input.txt", "--json")
    by_path = run("plan", str(RECIPES / "shakespeare.yaml"), "data.path=input.txt", "--json")
    assert named.exit_code == by_path.exit_code == 0, named.output
    ours, theirs = json.loads(named.stdout), json.loads(by_path.stdout)
    assert [ours["sources"]["optim.name"], theirs["sources"]["optim.name"]] == ["recipe", "file"]
    assert ours["config"] == theirs["config"] and ours["choices"].keys() == theirs["choices"].keys()
    Path("shakespeare").rmdir()
    Path("shakespeare").write_text("model: {builder: 'raytrain.models.gpt:gpt'}\noptim: {rate: 1}\n")
    assert "optim.rate" in run("plan", "shakespeare", "data.path=input.txt").stderr


def test_recipes_are_listed_printed_and_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = run("recipes").stdout.splitlines()
    assert [line.split()[0] for line in listed] == sorted(path.stem for path in RECIPES.glob("*.yaml"))
    assert run("recipes", "gpt_text").stdout == (RECIPES / "gpt_text.yaml").read_text()
    unknown = run("recipes", "gpt_txt")
    assert unknown.exit_code == 2 and "tabular" in unknown.stderr and "did you mean gpt_text?" in unknown.stderr
    for verb in ("train", "plan", "tune"):
        refused = run(verb, "shakespear", "data.path=input.txt")
        assert refused.exit_code == 2 and "did you mean shakespeare?" in refused.stderr, verb
        assert "cnn_idx, custom, default, gpt_text" in refused.stderr
    assert "did you mean tabular?" in run("bench", "lr", "tabula").stderr
