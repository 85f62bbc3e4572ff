"""From a name in a job to what it builds, and every way in which that goes wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from raytrain.errors import InputError
from raytrain.models.registry import call_builder, check_shadowing, resolve, to_trainable
from raytrain.models.sizes import SizeError
from raytrain.trainable import Trainable

MINE = """
import torch

class Net(torch.nn.Linear):
    def __init__(self, *, size: int):
        super().__init__(size, size)

def build(*, size):
    return Net(size=size)

NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of a user's, with import path and modules put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    (tmp_path / "mine_registry.py").write_text(MINE)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith("_registry"):
            del sys.modules[name]


def test_the_working_directory_is_importable_but_last(folder: Path) -> None:
    build = resolve("mine_registry:build", "model.builder")
    assert to_trainable(build(size=3)).module.weight.shape == (3, 3)
    assert sys.path[-1] == str(folder) and sys.path.count(str(folder)) == 1
    resolve("mine_registry:Net", "model.builder")
    assert sys.path.count(str(folder)) == 1


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("mine_registry", "'mine_registry', expected module:function"),
        ("mine_registry:", "expected module:function"),
        ("mine registry:build", "expected module:function"),
        (7, "seen 7, expected module:function"),
        ("mine_registry:bulid", r"has no bulid.*did you mean build\?"),
        ("mine_registry:NUMBER", "a int, expected a function or a class"),
        ("nowhere_registry:build", "there is no module nowhere_registry"),
        ("mine_registry.inner:build", "there is no module mine_registry.inner"),
        ("needs_registry:build", "imports the missing module not_installed_here"),
        ("broken_registry:build", "whose import raises SyntaxError"),
        ("fails_registry:build", "whose import raises RuntimeError: no config"),
    ],
)
def test_names_that_lead_nowhere_are_input_errors(folder: Path, path: Any, seen: str) -> None:
    (folder / "needs_registry.py").write_text("import not_installed_here\n")
    (folder / "broken_registry.py").write_text("def build(:\n")
    (folder / "fails_registry.py").write_text("raise RuntimeError('no config')\n")
    with pytest.raises(InputError, match=seen) as caught:
        resolve(path, "model.builder")
    assert caught.value.key == "model.builder"


@pytest.mark.parametrize("name", ["raytrain", "experts", "jobs", "cluster"])
def test_code_that_shadows_our_packages_is_named(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "default.yaml").write_text("{}\n")
    check_shadowing()  # a folder without code shadows nothing
    (folder / name / "__init__.py").touch()
    with pytest.raises(InputError, match=f"shadows the package {name}") as caught:
        resolve("mine_registry:build", "model.builder")
    assert caught.value.key == str(folder / name)


def test_a_file_that_shadows_is_named_and_our_own_folder_is_let_be(folder: Path) -> None:
    (folder / "jobs.py").touch()
    with pytest.raises(InputError, match=r"jobs\.py"):
        check_shadowing(str(folder))
    check_shadowing(str(Path(__file__).parents[4]))


def plain(*, size: int, depth: int = 2, vocab_size: int = 0, experts: Any = None) -> tuple[Any, ...]:
    return size, depth, vocab_size, experts


SECTIONS = {"experts": "the section", "loop": "another"}


def test_keys_sections_and_source_facts_become_arguments() -> None:
    assert call_builder(plain, {"size": 1}, sections=SECTIONS) == (1, 2, 0, "the section")
    assert call_builder(plain, {"size": 1}, sections=SECTIONS, vocab_size=65)[2] == 65
    assert call_builder(plain, {"size": 1, "vocab_size": 9}, sections={}, vocab_size=65) == (1, 2, 9, None)
    assert call_builder(plain, {"size": 1, "experts": 4}, sections=SECTIONS)[3] == 4
    facts = {"vocab_size": None, "num_features": 784}
    assert call_builder(plain, {"size": 1}, sections={}, source_facts=facts)[2] == 0
    assert call_builder(lambda *, num_features: num_features, {}, sections={}, source_facts=facts) == 784


def test_a_function_with_keywords_takes_every_key_but_no_section_by_itself() -> None:
    assert call_builder(dict, {"a": 1}, sections=SECTIONS) == {"a": 1}

    def anything(size: int, **more: Any) -> Any:
        return size, more

    assert call_builder(anything, {"size": 1, "b": 2}, sections=SECTIONS, vocab_size=3) == (1, {"b": 2})


@pytest.mark.parametrize(
    ("keys", "key", "text"),
    [
        (
            {"size": 1, "dept": 3},
            "model.dept",
            r"one of depth, size, vocab_size; did you mean model\.depth\?",
        ),
        ({"size": 1, "zzz": 3}, "model.zzz", "expected one of depth, size, vocab_size$"),
        ({"depth": 3}, "model.size", "seen no value.*plain needs it"),
    ],
)
def test_unknown_and_missing_keys_are_named(keys: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(InputError, match=text) as caught:
        call_builder(plain, keys, sections=SECTIONS)
    assert caught.value.key == key


def test_a_dataset_function_has_its_own_section_in_messages() -> None:
    with pytest.raises(InputError) as caught:
        call_builder(plain, {"size": 1, "rows": 3}, sections={}, key="data")
    assert caught.value.key == "data.rows"


def test_the_builders_own_value_and_type_errors_are_input_errors() -> None:
    def picky(*, size: Any) -> Any:
        if size == 0:
            raise SizeError("size", seen="0", expected="more")
        if size == 1:
            raise InputError("model.size", seen="1", expected="2")
        raise ValueError("13 is unlucky") if size == 13 else KeyError(size)

    with pytest.raises(InputError, match=r"model: seen ValueError from .*picky: 13 is unlucky"):
        call_builder(picky, {"size": 13}, sections={})
    with pytest.raises(InputError, match=r"model\.size: seen 0, expected more"):
        call_builder(picky, {"size": 0}, sections={})
    with pytest.raises(InputError, match=r"^model\.size: seen 1, expected 2$"):
        call_builder(picky, {"size": 1}, sections={})
    with pytest.raises(KeyError):  # a bug of the builder's keeps its own traceback
        call_builder(picky, {"size": 5}, sections={})
    with pytest.raises(InputError, match="model: seen TypeError"):
        call_builder(lambda *, size: size + 1, {"size": "3"}, sections={})


def test_a_builder_returns_a_trainable_or_a_module() -> None:
    made = Trainable.from_module(nn.Linear(2, 2))
    assert to_trainable(made) is made
    assert isinstance(to_trainable(nn.Linear(2, 2)), Trainable)
    for wrong, seen in ((None, "returned None"), (nn.Linear, "returned a type")):
        with pytest.raises(InputError, match=seen) as caught:
            to_trainable(wrong)
        assert caught.value.key == "model.builder"
