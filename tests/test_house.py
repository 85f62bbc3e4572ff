"""The house rules of the product: who imports whom, how long things are, what they are called."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["cluster", "raytrain", "experts", "jobs"]
"""From the ground up: a package imports those before it, never one after it."""

RAY_LAZILY = {
    "cluster.devices.inventory",
    "cluster.checks.preflight",
    "cluster.telemetry.process",
    "jobs.job.spec",
    "jobs.plan",
    "jobs.__main__",
}
RAY_AT_THE_EDGE = ("raytrain.execution", "raytrain.data.sources.ray_dataset", "experts.hosts")
"""Modules, or packages with all that is in them, that import Ray."""
TORCH_FREE = {
    "raytrain.config.sections",
    "raytrain.config.decode",
    "raytrain.config.yaml12",
    "raytrain.errors",
    "raytrain.runs.records",
    "raytrain.runs.folder",
    "raytrain.plan.plan",
    "experts.config",
    "experts.shapes",
    "experts.plan.sizes",
    "jobs.job.spec",
    "jobs.plan",
}
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
BANNED = {
    "manager", "handler", "helper", "helpers", "util", "utils", "common", "misc", "base", "impl",
    "processor", "wrapper",
}  # fmt: skip
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {
    "torch.load", "eval", "exec",
    "yaml.load", "yaml.load_all", "yaml.safe_load", "yaml.unsafe_load", "yaml.full_load",
}  # fmt: skip
"""YAML is read by `raytrain.config.yaml12` alone, whose own constructor takes PyYAML's node tree."""
UNSAFE_NAMES = {"FileSystemReader", "DefaultLoadPlanner"}
"""DCP's own readers unpickle `.metadata` and byte objects."""


@dataclass(frozen=True)
class Module:
    """One file of the product."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def place(self) -> str:
        return self.path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Import:
    """One module that a file imports; `lazy` where it happens inside a function."""

    target: str
    line: int
    lazy: bool


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text()
            found.append(Module(name=name, path=path, text=text, tree=ast.parse(text)))
    return tuple(found)


def imports_of(module: Module) -> Iterator[Import]:
    """Every import of a file; those under `if TYPE_CHECKING` are for the type checker and do not count."""
    stack: list[tuple[ast.AST, bool]] = [(module.tree, False)]
    while stack:
        node, lazy = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            yield from (Import(f"{source}.{alias.name}", node.lineno, lazy) for alias in node.names)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack.extend((child, inside) for child in ast.iter_child_nodes(node))


def package_of(name: str) -> str:
    return name.split(".")[0]


def at(module: Module, line: int, what: str) -> str:
    return f"{module.place}:{line} {what}"


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


# ---------------------------------------------------------------- imports


def test_imports_go_one_way() -> None:
    upward = [
        at(module, found.line, f"imports {found.target}")
        for module in modules()
        for found in imports_of(module)
        if package_of(found.target) in PACKAGES
        and PACKAGES.index(package_of(found.target)) > PACKAGES.index(package_of(module.name))
    ]
    assert not upward, upward


def test_nothing_imports_tests_and_imports_are_absolute() -> None:
    wrong = [
        at(module, node.lineno, ast.unparse(node))
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and (node.level or package_of(node.module or "") == "tests")
    ]
    assert not wrong, wrong


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    known = {module.name for module in modules()}
    edges = {
        module.name: {
            name
            for found in imports_of(module)
            if not found.lazy
            for name in (found.target, found.target.rpartition(".")[0])
            if name in known and name != module.name
        }
        for module in modules()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(known):
        visit(name, ())


def test_ray_stays_at_the_edge() -> None:
    wrong = []
    for module in modules():
        for found in imports_of(module):
            if package_of(found.target) != "ray":
                continue
            lazily = module.name in RAY_LAZILY
            allowed = lazily or module.name.startswith(RAY_AT_THE_EDGE) or package_of(module.name) == "jobs"
            if not allowed or (lazily and not found.lazy):
                wrong.append(at(module, found.line, f"imports {found.target}"))
    assert not wrong, wrong


def test_torch_stays_out_of_what_must_be_light() -> None:
    wrong = [
        at(module, found.line, f"imports {found.target}")
        for module in modules()
        if module.name in TORCH_FREE or package_of(module.name) == "cluster"
        for found in imports_of(module)
        if package_of(found.target) in ("torch", "safetensors") and "numpy" not in found.target
    ]
    assert not wrong, wrong


def test_matplotlib_is_imported_in_one_module() -> None:
    wrong = [
        at(module, found.line, f"imports {found.target}")
        for module in modules()
        if module.name != "raytrain.report.plots"
        for found in imports_of(module)
        if package_of(found.target) in ("matplotlib", "pylab")
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("name", sorted(TORCH_FREE | {"cluster.devices.inventory", "jobs.__main__"}))
def test_importing_it_leaves_torch_and_ray_unloaded(name: str) -> None:
    heavy = ("torch", "ray", "matplotlib", "pandas")
    code = f"import sys, {name}; print([heavy for heavy in {heavy} if heavy in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stdout + done.stderr


def test_init_files_hold_nothing_but_a_docstring() -> None:
    full = [
        module.place
        for module in modules()
        if module.path.name == "__init__.py" and module.tree.body
        if len(module.tree.body) > 1 or ast.get_docstring(module.tree) is None
    ]
    assert not full, full


# ---------------------------------------------------------------- size and names


def test_modules_and_functions_stay_short() -> None:
    long = [module.place for module in modules() if len(module.text.splitlines()) > MAX_MODULE_LINES]
    for module in modules():
        for node in functions_of(module.tree):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                long.append(at(module, node.lineno, f"{node.name} has {lines} lines"))
    assert not long, long


def test_names_say_what_a_thing_is() -> None:
    wrong = []
    for module in modules():
        names = [(module.name.rpartition(".")[2], 1)]
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        names += [(node.name, node.lineno) for node in ast.walk(module.tree) if isinstance(node, kinds)]
        for name, line in names:
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}
            if words & BANNED:
                wrong.append(at(module, line, name))
    assert not wrong, wrong


def test_public_things_have_docstrings() -> None:
    bare = []
    for module in modules():
        if module.path.name != "__init__.py" and ast.get_docstring(module.tree) is None:
            bare.append(at(module, 1, "the module"))
        for node in module.tree.body:
            kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            if isinstance(node, kinds) and not node.name.startswith("_") and ast.get_docstring(node) is None:
                bare.append(at(module, node.lineno, node.name))
    assert not bare, bare


def test_nothing_is_left_half_done_or_swallowed() -> None:
    unfinished = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|not implemented|NotImplementedError", re.IGNORECASE)
    wrong = []
    for module in modules():
        lines = enumerate(module.text.splitlines(), 1)
        wrong += [at(module, n, line.strip()) for n, line in lines if unfinished.search(line)]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and all(isinstance(step, ast.Pass) for step in node.body):
                caught = ast.unparse(node.type) if node.type else "everything"
                if caught in ("everything", "Exception", "BaseException"):
                    wrong.append(at(module, node.lineno, f"swallows {caught}"))
    assert not wrong, wrong


# ---------------------------------------------------------------- safety and order


def _unsafe(module: Module, node: ast.AST) -> str | None:
    """What makes a node unsafe to run on a file that somebody else wrote, or None."""
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called in UNSAFE_CALLS:
            return called
        if keywords.get("allow_pickle", "False") != "False" or keywords.get("weights_only", "True") != "True":
            return f"{called} with pickles allowed"
    if isinstance(node, ast.Name | ast.Attribute | ast.alias):
        name = ast.unparse(node).rpartition(".")[2]
        return name if name in UNSAFE_NAMES else None
    return None


def test_nothing_reads_a_pickle_or_runs_what_it_reads() -> None:
    wrong = [
        at(module, found.line, f"imports {found.target}")
        for module in modules()
        for found in imports_of(module)
        if package_of(found.target) in UNSAFE_MODULES
    ]
    for module in modules():
        for node in ast.walk(module.tree):
            if reason := _unsafe(module, node):
                wrong.append(at(module, getattr(node, "lineno", 1), reason))
    assert not wrong, wrong


TOPICS = {
    "masks kept and cleared": "ATTN-03", "mixed precision": "PREC-01", "fp16's scale": "PREC-03",
    "loading of data": "DATA-05", "memory on record": "MON-01", "accumulation": "LOOP-03",
}  # fmt: skip
"""What the guide's own tests are about, and a row that a test of ours shows of each."""


@pytest.mark.covers("TEST-01", "SRC-12")
def test_no_test_mocks_what_it_tests_or_asserts_a_constant() -> None:
    """And the topics of the guide's tests each have one of ours."""
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py"))}
    assert len(trees) > 100
    wrong = [f"{path.name}:{getattr(node, 'lineno', 1)}" for path, tree in trees.items() for node in ast.walk(tree)
             if _mocks(node) or (isinstance(node, ast.Assert) and _is_constant(node.test))]  # fmt: skip
    assert not wrong, wrong
    marked = {row for path in trees for row in re.findall(r'"([A-Z]+-\d\d)"', path.read_text())}
    assert not [topic for topic, row in TOPICS.items() if row not in marked]


def _mocks(node: ast.AST) -> bool:
    named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return any("mock" in name for name in [*named, (isinstance(node, ast.ImportFrom) and node.module) or ""])


def _is_constant(test: ast.expr) -> bool:
    """True for `assert True`, `assert 1 == 1`, `assert not 0`: nothing in it is looked up or called."""
    return not any(isinstance(part, ast.Name | ast.Attribute | ast.Call | ast.Await) for part in ast.walk(test))


@pytest.mark.parametrize("text", ["assert True", "assert 1 == 1, 'why'", "from unittest.mock import Mock"])
def test_a_constant_and_a_mock_are_seen(text: str) -> None:
    nodes = list(ast.walk(ast.parse(text)))
    assert any(_mocks(node) or (isinstance(node, ast.Assert) and _is_constant(node.test)) for node in nodes)


def test_ruff_is_content() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
