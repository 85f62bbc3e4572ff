"""From a name in a job to what it builds, and every way in which that goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from raytrain.errors import InputError
from raytrain.models.registry import call_builder, check_keys, to_trainable
from raytrain.models.sizes import SizeError
from raytrain.trainable import Trainable


def plain(*, size: int, depth: int = 2, vocab_size: int = 0, experts: Any = None) -> tuple[Any, ...]:
    return size, depth, vocab_size, experts


SECTIONS = {"experts": "the section", "loop": "another"}


def test_keys_sections_and_source_facts_become_arguments() -> None:
    assert call_builder(plain, {"size": 1}, sections=SECTIONS) == (1, 2, 0, "the section")
    assert call_builder(plain, {"size": 1}, sections=SECTIONS, source_facts={"vocab_size": 65})[2] == 65
    assert call_builder(plain, {"size": 1, "vocab_size": 9}, sections={}, source_facts={"vocab_size": 65}) == (
        1,
        2,
        9,
        None,
    )
    assert call_builder(plain, {"size": 1, "experts": 4}, sections=SECTIONS)[3] == 4
    facts = {"vocab_size": None, "num_features": 784}
    assert call_builder(plain, {"size": 1}, sections={}, source_facts=facts)[2] == 0
    assert call_builder(lambda *, num_features: num_features, {}, sections={}, source_facts=facts) == 784


def test_a_function_with_keywords_accepts_every_key_but_no_whole_section() -> None:
    assert call_builder(dict, {"a": 1}, sections=SECTIONS) == {"a": 1}

    def anything(size: int, **more: Any) -> Any:
        return size, more

    assert call_builder(anything, {"size": 1, "b": 2}, sections=SECTIONS, source_facts={"vocab_size": 3}) == (
        1,
        {"b": 2},
    )


@pytest.mark.parametrize(
    ("keys", "key", "text"),
    [
        ({"size": 1, "dept": 3}, "model.dept", r"did you mean model\.depth\? Got .*one of depth, size, vocab_size"),
        ({"size": 1, "zzz": 3}, "model.zzz", "expected one of depth, size, vocab_size; remove model.zzz$"),
        ({"depth": 3}, "model.size", "got no value.*plain requires it"),
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
            raise SizeError("size", got="0", expected="more")
        if size == 1:
            raise InputError("model.size", got="1", expected="2")
        raise ValueError("13 is unlucky") if size == 13 else KeyError(size)

    with pytest.raises(InputError, match=r"model: got ValueError from .*picky: 13 is unlucky"):
        call_builder(picky, {"size": 13}, sections={})
    with pytest.raises(InputError, match=r"model\.size: got 0, expected more"):
        call_builder(picky, {"size": 0}, sections={})
    with pytest.raises(InputError, match=r"^model\.size: got 1, expected 2$"):
        call_builder(picky, {"size": 1}, sections={})
    with pytest.raises(KeyError):  # a bug of the builder's keeps its own traceback
        call_builder(picky, {"size": 5}, sections={})
    with pytest.raises(InputError, match="model: got TypeError"):
        call_builder(lambda *, size: size + 1, {"size": "3"}, sections={})


def test_a_builder_returns_a_trainable_or_a_module() -> None:
    made = Trainable.from_module(nn.Linear(2, 2))
    assert to_trainable(made) is made
    assert isinstance(to_trainable(nn.Linear(2, 2)), Trainable)
    for wrong, seen in ((None, "returned None"), (nn.Linear, "returned the class Linear")):
        with pytest.raises(InputError, match=seen) as caught:
            to_trainable(wrong)
        assert caught.value.key == "model.builder"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (nn.Linear, "got the class Linear, expected an instance of it; write Linear(), with parentheses"),
        (plain, "got a function, expected a Trainable or a torch.nn.Module"),
        (dict, "got the class dict, expected a Trainable or a torch.nn.Module"),
        (nn.Module(), "got a Module without a method forward"),
    ],
)
def test_what_a_program_gives_as_the_module_is_not_said_to_come_from_a_builder(given: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        to_trainable(given, key="model.module")
    assert str(caught.value).startswith(f"model.module: {words}")


def test_a_key_of_raytrain_that_is_also_a_parameter_is_refused_where_it_is_given() -> None:
    check_keys(plain, ["size"], sections=[], ours=["init_from"])
    with pytest.raises(
        InputError, match=r"model\.depth: got a key of raytrain, and .*plain has a parameter of that name"
    ):
        check_keys(plain, ["size"], sections=[], ours=["depth"])
