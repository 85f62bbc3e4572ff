"""The reference parts of the READMEs are written from the code: `python tests/test_reference.py --write`.

Between two comment lines stand the keys of a job with their defaults (jobs/README.md) and, in each package's
README, its modules with the first sentence of their docstrings.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from jobs.job.spec import JobSpec, load_spec, refuse_later
from raytrain.config.decode import load_yaml
from raytrain.config.messages import key_rows
from raytrain.data.sources.sections import SOURCES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cluster", "raytrain", "experts", "jobs")
BUILDERS = (
    "raytrain.models.gpt:gpt",
    "raytrain.models.mlp:mlp",
    "raytrain.models.cnn:cnn",
    "raytrain.models.transformers:causal_lm",
    "raytrain.models.transformers:classifier",
    "experts.models:moe_gpt",
    "experts.models:moe_mlp",
)


def keys_table() -> str:
    """Every key that a job can hold, with what it accepts, its default and its meaning."""
    lines = ["| key | accepts | default | meaning |", "|---|---|---|---|"]
    for row in key_rows(JobSpec):
        cells = (f"`{row.key}`", row.expected, f"`{row.default}`", row.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def builders_table() -> str:
    """Every built-in builder with the keys of `model` it accepts and their defaults."""
    lines = ["| `model.builder` | keys |", "|---|---|"]
    for builder in BUILDERS:
        module, _, name = builder.partition(":")
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
        lines.append(f"| `{builder}` | {', '.join(_parameter(one) for one in parameters)} |")
    return "\n".join(lines)


def _parameter(one: inspect.Parameter) -> str:
    from_data = one.name in ("vocab_size", "num_features", "num_classes", "class_names", "image_shape", "experts")
    if from_data or one.default is inspect.Parameter.empty:
        return f"`{one.name}`"
    default = list(one.default) if isinstance(one.default, tuple) else one.default
    return f"`{one.name}: {json.dumps(default)}`"


def sources_table() -> str:
    """Every built-in source with its own keys of `data`."""
    lines = ["| `data.source` | key | accepts | default | meaning |", "|---|---|---|---|---|"]
    for source, section in SOURCES.items():
        for row in key_rows(section):
            default = row.default if row.default == "required" else f"`{row.default}`"
            lines.append(f"| `{source}` | `{row.key}` | {row.expected} | {default} | {row.meaning} |")
    return "\n".join(lines)


def modules_table(package: str) -> str:
    """Every module of a package and the first sentence of its docstring."""
    lines = ["| module | what it is |", "|---|---|"]
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.name == "__init__.py":
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        sentence = " ".join(docstring.split("\n\n")[0].split())
        first = re.split(r"(?<=\.) (?=[A-Z`])", sentence)[0].replace("|", "\\|")
        lines.append(f"| `{path.relative_to(ROOT / package).as_posix()}` | {first} |")
    return "\n".join(lines)


def python_table() -> str:
    """Every name in the `__all__` of a module, which makes it public, with the first sentence of its docstring."""
    lines = ["| name | what it is |", "|---|---|"]
    for package in reversed(PACKAGES):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            if re.search(r"^__all__ = ", path.read_text(), re.MULTILINE):
                module = importlib.import_module(name)
                lines += [f"| `{name}.{one}` | {_sentence(getattr(module, one))} |" for one in module.__all__]
    return "\n".join(lines)


def _sentence(thing: object) -> str:
    first = (inspect.getdoc(thing) or "").split("\n\n")[0]
    return re.split(r"(?<=\.) (?=[A-Z`])", " ".join(first.split()))[0].replace("|", "\\|")


PARTS: dict[tuple[str, str], Callable[[], str]] = {
    ("jobs/README.md", "keys"): keys_table,
    ("jobs/README.md", "python"): python_table,
    ("jobs/README.md", "builders"): builders_table,
    ("jobs/README.md", "sources"): sources_table,
    **{(f"{package}/MODULES.md", "modules"): partial(modules_table, package) for package in PACKAGES},
}


def with_part(text: str, *, name: str, part: str) -> str:
    """The text with `part` between its comment lines `<!-- name: ... -->` and `<!-- end of name -->`."""
    pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    replaced, count = pattern.subn(lambda found: f"{found[1]}\n{part}\n\n{found[2]}", text)
    assert count == 1, f"expected one part named {name}, found {count}"
    return replaced


@pytest.mark.parametrize(("file", "name"), sorted(PARTS))
def test_the_reference_matches_the_code(file: str, name: str) -> None:
    text = (ROOT / file).read_text()
    written = with_part(text, name=name, part=PARTS[file, name]())
    assert text == written, f"{file} is behind the code: run python tests/test_reference.py --write"


@pytest.mark.covers("SRC-04")
def test_the_reference_lists_every_section_with_the_defaults_of_the_code() -> None:
    """The table comes from the schema; here it is held against an instance, which is what a job gets."""
    table = (ROOT / "jobs/README.md").read_text().partition("<!-- keys:")[2]
    cells = dict(re.findall(r"^\| `([\w.]+)` \|.*?\| `(.*?)` \|", table, re.MULTILINE))
    spec = load_spec(mapping={"model": {"builder": "a:b"}, "data": {"source": "text"}}).spec
    assert {key.partition(".")[0] for key in cells} == set(type(spec).model_fields)
    for key in ("optim.lr", "loop.log_every", "save.keep", "retry.rollbacks", "telemetry.every"):
        section, _, name = key.partition(".")
        field = type(getattr(spec, section)).model_fields[name]
        assert float(cells[key]) == field.default


def test_the_examples_of_the_readmes_are_jobs(tmp_path: Path) -> None:
    readmes = [(ROOT / place / "README.md").read_text() for place in (".", *PACKAGES)]
    blocks = [block for readme in readmes for block in re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)]
    examples = [text for text in blocks if "model:" in text]
    assert len(examples) == 3 and all(8 <= len(example.splitlines()) <= 12 for example in examples)
    for example in examples:
        job = tmp_path / "job.yaml"
        job.write_text(example)
        loaded = load_spec(job, ["optim.lr=2e-3"])
        assert loaded.spec.optim.lr == 2e-3
        refuse_later(loaded.spec, "train")
        given = load_yaml(example, origin="README")["model"]
        assert {"builder": loaded.spec.model.builder, **loaded.spec.model.keys} == given


@pytest.mark.covers("VER-16", "COMPAT-05")
def test_the_statements_that_are_kept_for_information_hold_here() -> None:
    kept = (ROOT / "jobs/bench/README.md").read_text().partition("## Where the goals come from")[2]
    rows = dict(re.findall(r"^\| ([a-z ]+) \| .* \| (.*) \|$", kept, re.MULTILINE))
    readme = (ROOT / "README.md").read_text().partition("## Your own job")[2]
    job = readme.partition("```yaml\n")[2].partition("```")[0]
    assert (
        f"the job file of the main README has {len(job.splitlines())}"
        in rows["lines that change to train an existing model this way"]
    )
    pins = dict(re.findall(r"^(torch|ray)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert f"torch {pins['torch']} and Ray {pins['ray']}" in rows["tested stack"]


def test_every_file_that_a_readme_links_to_exists() -> None:
    readmes = [ROOT / "README.md", *(ROOT / package / "README.md" for package in (*PACKAGES, "tests", "jobs/bench"))]
    channel = re.compile(r"\]\((?!http)([^)#]+)\)")
    targets = [readme.parent / found for readme in readmes for found in channel.findall(readme.read_text())]
    assert len(targets) > 10
    assert not [target for target in targets if not target.exists()]


def main(arguments: list[str]) -> int:
    """`--write` brings every part up to date."""
    if arguments != ["--write"]:
        print("usage: python tests/test_reference.py --write")
        return 2
    for (file, name), part in PARTS.items():
        path = ROOT / file
        path.write_text(with_part(path.read_text(), name=name, part=part()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
