"""The structure of the product: which folder imports which, what stays light, and what is unsafe.

Everything is read from the code with `ast`; one test imports modules, in a separate process. The rules are data at
the top of this file: the layer order and the exceptions with their reasons.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["cluster", "raytrain", "experts", "jobs"]
"""From the lowest up: a package imports those before it, never one after it."""
LAYERS = {
    "": PACKAGES,
    "raytrain": [
        "errors", "accelerator", "trainable", "config", "runs", "plan", "checkpoint", "models", "data", "train",
        "autotune", "infer", "report", "execution",
    ],
    "experts": [
        "config", "transport", "placement", "sizes", "router", "grouped", "lifecycle", "member",
        "exchange", "layer", "hosts", "distribute", "models", "huggingface",
    ],
}  # fmt: skip
"""folder -> its entries from the lowest up. Imports inside functions count as well; those for types do not."""
ONLY_FROM = {"raytrain.report": {"cluster.wording", "raytrain.config", "raytrain.runs", "raytrain.report"}}
"""folder -> everything of ours that it may import. A report is made from records alone, and written in words."""
UPWARD_LEFT: set[tuple[str, str]] = set()
"""(importing, imported) entries that break the layer order today."""

RAY_LAZILY = {
    "cluster.ray_runtime",
    "cluster.devices.inventory",
    "cluster.preflight",
    "cluster.configs.two_nodes",
    "cluster.telemetry.sampler",
    "cluster.telemetry.processes",
    "jobs.job.spec",
    "jobs.driver.planning",
    "jobs.plan",
    "jobs.__main__",
}
"""Modules that import Ray inside functions only."""
RAY_AT_THE_EDGE = ("raytrain.execution", "raytrain.infer.ray_data", "raytrain.infer.stages.actors", "experts.hosts")
"""Modules, or packages with everything in them, that import Ray. So may all of `jobs`."""
TORCH_FREE = {
    "raytrain.config.sections",
    "raytrain.config.decode",
    "raytrain.errors",
    "raytrain.runs.records",
    "raytrain.runs.folder",
    "raytrain.plan.plan",
    "experts.config",
    "experts.sizes",
    "jobs.job.spec",
    "jobs.driver.planning",
    "jobs.plan",
}
"""Modules that the command line loads before it knows whether there is anything to train."""
FRONT_DOORS = {"raytrain", "experts", "jobs"}
"""Packages whose `__init__` has code: what is imported first makes sure of the others, and `raytrain.train` is lazy."""
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {
    "torch.load", "eval", "exec",
    "yaml.load", "yaml.load_all", "yaml.safe_load", "yaml.unsafe_load", "yaml.full_load",
}  # fmt: skip
"""Only `raytrain.config.decode` reads YAML; its own constructor takes PyYAML's node tree."""
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


@cache
def imports_of(module: Module) -> tuple[Import, ...]:
    """Every import of a file; those under `if TYPE_CHECKING` are for the type checker and do not count."""
    found: list[Import] = []
    stack: list[tuple[ast.AST, bool]] = [(module.tree, False)]
    while stack:
        node, lazy = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            found += (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            found += (Import(f"{source}.{alias.name}", node.lineno, lazy) for alias in node.names)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack.extend((child, inside) for child in ast.iter_child_nodes(node))
    return tuple(found)


@dataclass(frozen=True)
class Edge:
    """A module of ours that imports a module of ours.

    Attributes:
        level: the deepest folder that holds both, dotted; "" for the repository.
        source, target: the entries of that folder in which the two modules are.
    """

    module: Module
    imported: Import
    level: str
    source: str
    target: str

    def __str__(self) -> str:
        return at(self.module, self.imported.line, f"imports {self.imported.target}")


@cache
def edges() -> tuple[Edge, ...]:
    """Every import of one module of ours by another, except of a package by what is inside it."""
    known = {module.name for module in modules()}
    found = []
    for module in modules():
        for imported in imports_of(module):
            target = imported.target if imported.target in known else imported.target.rpartition(".")[0]
            if target not in known:
                continue
            ours, other = module.name.split("."), target.split(".")
            shared = next((i for i, (a, b) in enumerate(zip(ours, other, strict=False)) if a != b), None)
            if shared is not None:
                found.append(Edge(module, imported, ".".join(ours[:shared]), ours[shared], other[shared]))
    return tuple(found)


def circles(graph: Mapping[str, Iterable[str]]) -> set[str]:
    """Nodes from which a path leads back to themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        rest = [start]
        while rest:
            new = set(graph.get(rest.pop(), ())) - seen
            seen |= new
            rest += new
        return seen

    return {node for node in graph if node in reached(node)}


def package_of(name: str) -> str:
    return name.split(".")[0]


def at(module: Module, line: int, what: str) -> str:
    return f"{module.place}:{line} {what}"


# ---------------------------------------------------------------- imports


def test_imports_go_one_way_between_packages_and_between_the_folders_inside() -> None:
    wrong = []
    for edge in edges():
        order = LAYERS.get(edge.level)
        if order is None:
            continue
        unknown = {edge.source, edge.target} - set(order)
        assert not unknown, f"give {unknown} a place in LAYERS"
        prefix = f"{edge.level}." if edge.level else ""
        known = (prefix + edge.source, prefix + edge.target) in UPWARD_LEFT
        if order.index(edge.target) > order.index(edge.source) and not known:
            wrong.append(str(edge))
    assert not wrong, wrong


def test_a_report_is_made_from_records_alone() -> None:
    wrong = [
        str(edge)
        for edge in edges()
        for folder, allowed in ONLY_FROM.items()
        if f"{edge.module.name}.".startswith(f"{folder}.")
        and not any(f"{edge.imported.target}.".startswith(f"{one}.") for one in allowed)
    ]
    assert not wrong, wrong


def test_no_entries_of_a_folder_import_each_other_in_a_circle() -> None:
    """At every level, folders and modules alike; imports inside functions count as well."""
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for edge in edges():
        graphs[edge.level][edge.source].add(edge.target)
    wrong = {level: sorted(circles(graph)) for level, graph in graphs.items()}
    assert not any(wrong.values()), {level: entries for level, entries in wrong.items() if entries}


def test_a_circle_is_seen() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": []}) == {"b", "c"}


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
    graph = {
        module.name: {
            name
            for found in imports_of(module)
            if not found.lazy
            for name in (found.target, found.target.rpartition(".")[0])
            if name in known and name != module.name
        }
        for module in modules()
    }
    assert not circles(graph), sorted(circles(graph))


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


def test_training_names_no_kind_of_gpu() -> None:
    """Only `raytrain.accelerator` knows how they differ; CUDA graphs, in inference, are a feature of CUDA alone."""
    named = {
        module.name
        for module in modules()
        if module.name.startswith("raytrain.") and re.search(r'torch\.cuda\.\w|\.type [!=]= "cuda"', module.text)
    }
    assert named == {"raytrain.infer.generate", "raytrain.autotune.step_probe"}


def test_matplotlib_is_imported_in_one_module() -> None:
    wrong = [
        at(module, found.line, f"imports {found.target}")
        for module in modules()
        if module.name != "raytrain.report.plots"
        for found in imports_of(module)
        if package_of(found.target) in ("matplotlib", "pylab")
    ]
    assert not wrong, wrong


IMPORTS = """
import importlib, json, sys
loaded = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    loaded[name] = [heavy for heavy in ("torch", "ray", "matplotlib", "pandas") if heavy in sys.modules]
print(json.dumps(loaded))
"""


def test_importing_light_modules_leaves_torch_and_ray_unloaded() -> None:
    """One interpreter imports them one after the other; the first that is named loads something heavy."""
    names = sorted(TORCH_FREE | {"cluster.devices.inventory", "jobs.__main__"})
    command = [sys.executable, "-c", IMPORTS, json.dumps(names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert sorted(loaded) == names and not any(loaded.values()), {name: got for name, got in loaded.items() if got}


def test_init_files_hold_nothing_but_a_docstring() -> None:
    full = [
        module.place
        for module in modules()
        if module.path.name == "__init__.py" and module.tree.body and module.name not in FRONT_DOORS
        if len(module.tree.body) > 1 or ast.get_docstring(module.tree) is None
    ]
    assert not full, full


# ---------------------------------------------------------------- names


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(at(module, node.lineno, ""))
    assert not (twice := {name: found for name, found in places.items() if len(found) > 1}), twice


def test_modules_have_docstrings() -> None:
    """MODULES.md is made of them."""
    bare = [
        module.place
        for module in modules()
        if module.path.name != "__init__.py" and ast.get_docstring(module.tree) is None
    ]
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
    """Why a node is unsafe to run on a file from an untrusted source, or None."""
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
"""Topic of one of the guide's own tests -> a row of FEATURES.md that a test of ours shows for it."""


@pytest.mark.covers("TEST-01", "SRC-12")
def test_no_test_mocks_what_it_tests_or_asserts_a_constant() -> None:
    """Each topic of the guide's tests also has a test of ours."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    assert len(trees) > 100
    wrong = [f"{path.name}:{getattr(node, 'lineno', 1)}" for path, tree in trees.items() for node in ast.walk(tree)
             if _mocks(node) or (isinstance(node, ast.Assert) and _is_constant(node.test))]  # fmt: skip
    assert not wrong, wrong
    marked = {row for path in trees for row in re.findall(r'"([A-Z]+-\d\d)"', texts[path])}
    assert not [topic for topic, row in TOPICS.items() if row not in marked]


def _mocks(node: ast.AST) -> bool:
    named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return any("mock" in name for name in [*named, (isinstance(node, ast.ImportFrom) and node.module) or ""])


def _is_constant(test: ast.expr) -> bool:
    """True for `assert True`, `assert 1 == 1`, `assert not 0`: no name is looked up and nothing is called."""
    return not any(isinstance(part, ast.Name | ast.Attribute | ast.Call | ast.Await) for part in ast.walk(test))


@pytest.mark.parametrize("text", ["assert True", "assert 1 == 1, 'why'", "from unittest.mock import Mock"])
def test_a_constant_and_a_mock_are_seen(text: str) -> None:
    nodes = list(ast.walk(ast.parse(text)))
    assert any(_mocks(node) or (isinstance(node, ast.Assert) and _is_constant(node.test)) for node in nodes)


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_has_no_complaint(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command.split(), "--no-cache", "."],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
