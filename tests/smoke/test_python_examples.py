"""The examples in the docstrings of the Python interface: every public function has one, and it shows what it says.

A module is part of the Python interface if it defines `__all__`; its names are public. The examples are doctests under
the heading `Example:`. All of them run in one process, in which Ray is running as in a notebook: those that train
first, then those that read what was trained.
"""

from __future__ import annotations

import ast
import csv
import doctest
import importlib
import inspect
import json
import random
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "raytrain", "experts", "jobs")
#: Verbs whose result is what they print: they have no function.
FOR_TERMINALS = {"bench", "keys", "recipes", "schema", "submit", "top"}
#: These train or search; the examples of the others read what these leave in `runs`.
FIRST = ("jobs.train:train", "jobs.train:Result", "jobs.tune:tune")
LIMIT_S = 400
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Public:
    """A public function or class, and the text of its docstring's examples; "" without one."""

    name: str
    thing: Any
    example: str


def public_modules() -> list[str]:
    """Names of all modules that define `__all__`, from their text."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            targets = [
                target
                for node in ast.parse(path.read_text()).body
                if isinstance(node, ast.Assign)
                for target in node.targets
            ]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                found.append(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."))
    return found


def example_of(thing: Any) -> str:
    """What stands under the heading `Example:` of a docstring."""
    lines = (inspect.getdoc(thing) or "").splitlines()
    if "Example:" not in lines:
        return ""
    indented = []
    for line in lines[lines.index("Example:") + 1 :]:
        if line and not line.startswith(" "):
            break
        indented.append(line)
    return textwrap.dedent("\n".join(indented))


def public_things() -> list[Public]:
    found = []
    for name in public_modules():
        module = importlib.import_module(name)
        things = {entry: getattr(module, entry) for entry in module.__all__}
        found += [Public(f"{name}:{entry}", thing, example_of(thing)) for entry, thing in things.items()]
    return found


def methods_of(thing: Any) -> list[str]:
    """Public methods and properties that a class of ours defines itself."""
    if not inspect.isclass(thing):
        return []
    kinds = (property, classmethod, staticmethod)
    return [
        name
        for name, value in vars(thing).items()
        if (inspect.isfunction(value) or isinstance(value, kinds))
        and not name.startswith("_")
        and name != "forward"  # an example calls the module
    ]


def without_example(things: list[Public]) -> list[str]:
    """Names of functions, classes, methods and properties that no example shows."""
    missing = []
    for one in things:
        examples = doctest.DocTestParser().get_examples(one.example)
        if not any(example.want for example in examples):  # an example that shows nothing cannot be wrong
            missing.append(one.name)
            continue
        used = {
            node.attr
            for example in examples
            for node in ast.walk(ast.parse(example.source))
            if isinstance(node, ast.Attribute)
        }
        missing += [f"{one.name}.{method}" for method in methods_of(one.thing) if method not in used]
    return missing


def failures_of(things: list[Public]) -> dict[str, str]:
    """Run the examples, each with names of its own, in the current folder; name -> doctest's report of a wrong one."""
    wrong = {}
    for one in sorted(things, key=lambda one: FIRST.index(one.name) if one.name in FIRST else len(FIRST)):
        test = doctest.DocTestParser().get_doctest(one.example, {"__name__": "example"}, one.name, None, 0)
        report: list[str] = []
        doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(test, out=report.append)
        if report:
            wrong[one.name] = "".join(report)
    return wrong


def write_rows(path: Path) -> None:
    """A table of 60 rows: three features, and a class of three."""
    draw = random.Random(0)
    rows = [[draw.gauss(0, 1) for _ in range(3)] for _ in range(60)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["x0", "x1", "x2", "y"], *([*row, row.index(max(row))] for row in rows)])


def run_all() -> None:
    """The process of the examples: prints the wrong ones as JSON."""
    write_rows(Path("rows.csv"))
    print("WRONG", json.dumps(failures_of(public_things())))


@pytest.mark.timeout(LIMIT_S + 30)
def test_every_example_runs_and_shows_what_it_says(shared_driver: Any, tmp_path: Path) -> None:
    out = shared_driver.ask({"script": __file__, "cwd": str(tmp_path)}, timeout=LIMIT_S)["out"]
    line = re.search(r"^WRONG (.*)$", out, re.MULTILINE)
    assert line, out
    wrong = json.loads(line[1])
    assert not wrong, "\n".join(wrong.values())


def test_every_public_function_class_method_and_property_has_an_example() -> None:
    assert without_example(public_things()) == []


def test_a_missing_or_a_wrong_example_is_found() -> None:
    """With things of its own: without an example, with one that shows nothing, with a wrong one, with a right one."""

    class Bare:
        """A class.

        Example:
            >>> 1 + 1
            2
        """

        def shown_nowhere(self) -> None:
            """A method."""

    right = Public("right", len, ">>> len('abc')\n3\n")
    silent, wrong = Public("silent", len, ">>> x = 1\n"), Public("wrong", len, ">>> len('abc')\n4\n")
    things = [right, silent, Public("none", len, ""), wrong, Public("Bare", Bare, example_of(Bare))]
    assert without_example(things) == ["silent", "none", "Bare.shown_nowhere"]
    assert list(failures_of(things)) == ["wrong"]


def test_every_verb_and_every_built_in_builder_is_public() -> None:
    """So that none is left out by leaving out `__all__`."""
    readme = (ROOT / "jobs/README.md").read_text()
    builders = set(re.findall(r"^\| `((?:raytrain|experts)\.[\w.]+:\w+)` \|", readme, re.MULTILINE))
    names = {one.name for one in public_things()}
    verbs = {f"jobs.{verb}:{verb}" for verb in main.commands if verb not in FOR_TERMINALS}
    assert len(builders) > 5 and len(verbs) > 5
    assert verbs | builders <= names


if __name__ == "__main__":
    run_all()
