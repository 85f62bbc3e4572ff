"""The keys of a job: as a list, in the help of a verb, as a JSON schema, and in the completion of a shell."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from jobs.__main__ import main
from jobs.completion import words_of
from jobs.job.keys import IMPORTANT, job_rows, job_schema
from jobs.job.spec import JobSpec, read_recipe, recipe_names
from raytrain.config.decode import accepts, apply_overrides, decode, load_yaml
from raytrain.config.messages import key_rows
from raytrain.errors import InputError

ROOT = Path(__file__).resolve().parents[4]


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(main, list(arguments), env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_help_fits_one_screen_and_lists_what_exists() -> None:
    lines = printed("--help").splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80 and not any(line.endswith("...") for line in lines[1:])
    assert {line.split()[0] for line in lines[lines.index("Commands:") + 1 :]} == set(main.commands)


#: Objects, which only Python gives, and what a search writes.
NO_TEXT = {"model.module", "data.train", "data.eval", "data.collate"}


def test_each_key_has_an_example_that_it_takes_and_that_its_error_shows() -> None:
    for row in key_rows(JobSpec):
        if row.key in NO_TEXT:
            assert row.example == ""
            continue
        (typed,) = shlex.split(row.example)
        assert typed.startswith(f"{row.key}=") and accepts(JobSpec, typed), row
        mapping, _ = apply_overrides({}, [f"{row.key}={{wrong: [{{}}]}}"])
        if accepts(JobSpec, f"{row.key}={{wrong: [{{}}]}}"):
            continue  # any mapping is right
        with pytest.raises(InputError) as caught:
            decode(JobSpec, mapping)
        assert str(caught.value).startswith(f"{row.key}: got ") and f"for example {row.example}" in str(caught.value)


@pytest.mark.parametrize("verb", ["train", "tune", "plan", "infer", "check"])
def test_the_help_of_a_verb_shows_its_important_keys_and_where_the_others_are(verb: str) -> None:
    text = printed(verb, "--help")
    shown = [line.split(" = ")[0].strip() for line in text.splitlines() if " = " in line]
    assert shown == list(IMPORTANT["train" if verb == "plan" else verb])
    assert "`raytrain keys`" in text and max(map(len, text.splitlines())) <= 80


def test_all_keys_those_of_a_section_and_one_key() -> None:
    rows = job_rows()
    assert {row.key for row in key_rows(JobSpec)} < {row.key for row in rows}
    listed = [line.split(" = ")[0] for line in printed("keys").splitlines() if not line.startswith(" ")]
    assert listed == [row.key for row in rows]
    section = printed("keys", "retry")
    assert [line.split(" = ")[0] for line in section.splitlines() if not line.startswith(" ")] == [
        row.key for row in rows if row.key.startswith("retry.")
    ]
    assert "arguments of your own builder" in printed("keys", "model")
    text = " ".join(printed("keys", "model").split())
    assert "model.hidden = [256, 256] an argument of raytrain.models.mlp:mlp model." in text
    assert "model.path = required an argument of raytrain.models.transformers:causal_lm, raytrain.mod" in text
    assert printed("keys", "data.vocabulary").splitlines() == [
        "data.vocabulary",
        "  meaning  what the tokens of a text are; for data.source text",
        "  accepts  bytes or chars",
        '  default  "bytes"',
        "  example  data.vocabulary=bytes",
    ]
    owners = [line for line in printed("keys", "data.labels").splitlines() if "meaning" in line]
    assert [line.rpartition("; ")[2] for line in owners] == ["for data.source text, jsonl", "for data.source idx"]
    assert printed("keys", "optim.lr").splitlines() == [
        "optim.lr",
        "  meaning  peak learning rate",
        "  accepts  a number > 0",
        "  default  0.001",
        "  example  optim.lr=0.001",
    ]


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    found = job_schema()
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def test_the_recipes_fit_the_schema_that_the_verb_writes(
    schema: jsonschema.Draft202012Validator, tmp_path: Path
) -> None:
    printed("schema", "--out", str(tmp_path / "job.schema.json"))
    assert json.loads((tmp_path / "job.schema.json").read_text()) == json.loads(printed("schema")) == schema.schema
    for name in recipe_names():
        schema.validate(load_yaml(read_recipe(name), origin=name))
    schema.validate({"extends": "default", "optim": {"lr": 1}})
    schema.validate({"data": {"source": "csv", "path": ["a.csv", "b.csv"], "features": None, "order": "of another"}})
    schema.validate({"data": {"source": "mine:rows", "label": 3}})
    schema.validate({"extends": "mine.yaml", "data": {"label": 3}})
    described = schema.schema["$defs"]["OptimConfig"]["properties"]["lr"]
    assert described["description"] == "peak learning rate" and described["default"] == 0.001


@pytest.mark.parametrize(
    "wrong",
    [
        {"loop": {"max_step": 1}}, {"loop": {"max_steps": 0}}, {"loop": {"max_steps": "ten"}}, {"optim": {"lr": 0}},
        {"precision": {"dtype": "float16"}}, {"lop": {}}, {"model": "mlp"}, {"extends": 3},
        {"data": {"source": "csv", "label": 3}}, {"data": {"source": "text", "path": 3}},
        {"data": {"source": "parquet", "order": "row"}},
    ],
)  # fmt: skip
def test_the_schema_refuses_what_a_job_may_not_hold(schema: jsonschema.Draft202012Validator, wrong: dict) -> None:
    assert not schema.is_valid(wrong)


def test_whole_numbers_may_be_written_with_an_exponent() -> None:
    text = printed("plan", "loop.max_steps=1e3", "loop.global_batch_size=6.4e1", "optim.lr=1e-3")
    assert "max steps: 1,000" in text and "global batch size: 64" in text and "learning rate: 0.001" in text


@pytest.mark.long
def test_bash_completes_verbs_recipes_and_keys(tmp_path: Path) -> None:
    """In a bash of its own, with the script that click writes for it."""
    command = tmp_path / "raytrain"
    command.write_text(f"#!{sys.executable}\nfrom jobs.__main__ import main\nmain(prog_name='raytrain')\n")
    command.chmod(0o755)
    script = """
    source <(_RAYTRAIN_COMPLETE=bash_source raytrain)
    compopt() { :; }  # bash has it during a completion only
    complete_line() {
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
        _raytrain_completion raytrain
        echo "${COMPREPLY[@]}"
    }
    complete_line raytrain tr
    complete_line raytrain train moe
    complete_line raytrain train loop.max
    complete_line raytrain keys optim.l
    complete_line raytrain train data.voc
    complete_line raytrain keys model.hid
    complete_line raytrain recipes cn
    complete_line raytrain train moe_hosts optim.name = ad
    complete_line raytrain train loop.deterministic =
    complete_line raytrain train data.path = inp
    complete_line raytrain submit train optim.na
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == [
        "train", "moe_hosts", "loop.max_steps=", "optim.lr", "data.vocabulary=", "model.hidden",
        "cnn_idx", "adamw", "true false", "", "optim.name=",
    ], done.stderr  # fmt: skip


def test_a_value_is_completed_from_the_words_that_its_key_accepts() -> None:
    """In zsh and fish, for which KEY=VALUE is one word."""
    complete = ShellComplete(main, {}, "raytrain", "_RAYTRAIN_COMPLETE").get_completions

    def completed(*words: str) -> list[str]:
        return [item.value for item in complete(list(words[:-1]), words[-1])]

    assert completed("train", "optim.name=ad") == ["optim.name=adamw"]
    assert completed("train", "job.yaml", "data.storage=") == [
        f"data.storage={word}" for word in ("auto", "resident", "pinned", "stream")
    ]
    assert completed("train", "data.labels=") == [f"data.labels={word}" for word in ("auto", "next", "same")]
    assert completed("train", "model.builder=x") == completed("train", "no.such=") == []
    assert words_of("precision.dtype")[0] == "auto" and words_of("loop") == words_of("loop.max_steps") == []
    assert "nccl" not in completed("bench", "") and completed("bench", "noth") == []
