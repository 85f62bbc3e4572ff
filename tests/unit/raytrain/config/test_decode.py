"""Strict YAML, overrides, and one clear message for each mistake."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import Section
from experts.config import ExpertsConfig
from raytrain.config.decode import apply_overrides, decode, dump_yaml, encode, load_yaml, parse_override
from raytrain.config.sections import DataConfig, LoopConfig, ModelConfig, OptimConfig, ScaleConfig
from raytrain.errors import InputError

SCALARS = [
    ("true", True), ("True", True), ("FALSE", False), ("tRue", "tRue"),
    ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("y", "y"), ("N", "N"),
    ("null", None), ("~", None), ("NULL", None), ("nUll", "nUll"),
    ("7", 7), ("+7", 7), ("-7", -7), ("010", 10), ("0o17", 15), ("0x1F", 31),
    ("0b11", "0b11"), ("1_000", "1_000"),
    ("1e-3", 1e-3), ("1E5", 1e5), ("1.", 1.0), (".5", 0.5), ("-1.5e+3", -1500.0), (".inf", math.inf),
    ("-.INF", -math.inf), ("1.5.2", "1.5.2"), ("2024-01-01", "2024-01-01"), ("12:30:45", "12:30:45"),
    ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"), ("=", "="), ("<<", "<<"),
    ("x y", "x y"),
    ("'7'", "7"), ('"true"', "true"), ("''", ""), ("cuda:0", "cuda:0"), ("s3://a/b", "s3://a/b"),
]  # fmt: skip


def is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


def mistake(cls: type[Section], values: Any, *, prefix: str = "loop") -> InputError:
    with pytest.raises(InputError) as caught:
        decode(cls, values, prefix=prefix)
    return caught.value


# ---------------------------------------------------------------- YAML


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_are_those_of_yaml_1_2_in_files_and_on_the_command_line(text: str, value: Any) -> None:
    assert is_same(load_yaml(f"a: {text}", origin="job.yaml")["a"], value)
    assert is_same(load_yaml(f"a: [{text}]", origin="job.yaml")["a"], [value])
    assert is_same(parse_override(f"a.b={text}")[1], value)


@pytest.mark.parametrize("text", ["{text}", " {text} ", "a\nb {text}\n", "[{a}] {b}:\t", "007", "true"])
def test_a_template_on_the_command_line_is_the_text_as_it_stands(text: str) -> None:
    assert parse_override(f"infer.template={text}") == ("infer.template", text)
    assert parse_override(f"infer.template={json.dumps(text)}") == ("infer.template", text)
    assert parse_override("infer.template=null") == ("infer.template", None)


def test_nan_and_an_empty_value() -> None:
    assert math.isnan(load_yaml("a: .nan", origin="job.yaml")["a"])
    assert load_yaml("a:\nb: 1", origin="job.yaml") == {"a": None, "b": 1}


def test_other_loaders_are_not_changed() -> None:
    load_yaml("a: on", origin="job.yaml")
    assert yaml.safe_load("a: on") == {"a": True}


def test_keys_are_scalars_too() -> None:
    assert list(load_yaml("on: 1\n010: 2\nno: 3", origin="j")) == ["on", 10, "no"]
    with pytest.raises(InputError, match=r"optim\.<<.*line 3.*extends"):
        load_yaml("a: &a {lr: 1}\noptim:\n  <<: *a", origin="j")


def test_an_alias_is_a_copy() -> None:
    loaded = load_yaml("a: &x {k: [1]}\nb: *x", origin="job.yaml")
    assert loaded == {"a": {"k": [1]}, "b": {"k": [1]}}
    assert loaded["a"] is not loaded["b"]


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("a: 1\nb: 2\na: 3", "a", "lines 1 and 3 of job.yaml"),
        ("loop:\n  lr: 1\n  lr: 1", "loop.lr", "lines 2 and 3"),
        ("loop: {lr: 1, lr: 2}", "loop.lr", "the key twice"),
        ("a: {1: x, 0x1: y}", "a.1", "the key twice"),
        ("a: [1, 2", "job.yaml", "line 1, column"),
        ("a: 1\n\tb: 2", "job.yaml", "spaces, not tabs"),
        ("a: 1\nb: c: d", "job.yaml", "line 2, column 5"),
        ("a: 'x", "job.yaml", "end of stream"),
        ("a: *nope", "job.yaml", "nope"),
        ("a: \x07", "job.yaml", "#x0007"),
        ("a: 1\n---\nb: 2", "job.yaml", "document"),
        ("- 1\n- 2", "job.yaml", "[1, 2] (a list)"),
        ("just words", "job.yaml", "a mapping"),
        ("", "job.yaml", "an empty file"),
        ("# only a comment\n", "job.yaml", "an empty file"),
        ("a: !!python/object/apply:os.system ['true']", "a", "python/object"),
        ("a: !!binary aGk=", "a", "the tag"),
        ("a: !mine 3", "a", "!mine"),
        ("a: !!int seven", "a", "'seven' is not a valid int"),
        ("? [1, 2]\n: 3", "job.yaml", "as a key"),
        ("a: " + "[" * 3000, "job.yaml", "nesting"),
        ("a: " + "9" * 5000, "a", "5000 digits"),
    ],
)
def test_an_invalid_job_file_is_one_error_with_its_location(text: str, key: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_yaml(text, origin="job.yaml")
    assert caught.value.key == key
    assert words in str(caught.value)


def test_aliases_of_aliases_are_refused_before_they_fill_the_memory() -> None:
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(InputError, match="more than 100000 values"):
        load_yaml("\n".join(rows), origin="job.yaml")


def test_dumped_yaml_is_read_back() -> None:
    draw = random.Random(0)
    words = ["a: b", "# x", "- y", "{", "é", "a\nb", " lead", "null ", "!t", "&a"]
    words += [text for text, _ in SCALARS]
    values: list[Any] = [1e300, 1e-7, 2**70, -0.0, [], {}, [[1], {"a": []}], *(value for _, value in SCALARS)]
    values += words
    for _ in range(50):
        draw.shuffle(values)
        job = {"one": values[:9], "two": {f"k{i}": value for i, value in enumerate(values[9:18])}, "on": None}
        assert load_yaml(dump_yaml(job), origin="job.yaml") == job


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("loop.max_steps=7", "loop.max_steps", 7),
        ("name=x", "name", "x"),
        ("optim.lr = 1e-3", "optim.lr", 1e-3),
        ("scale.workers=[1, 4]", "scale.workers", [1, 4]),
        ("experts.hosts={A100: 4}", "experts.hosts", {"A100": 4}),
        ("experts.hosts.A100=4", "experts.hosts.A100", 4),
        ("name='7'", "name", "7"),
        ("loop.epochs=null", "loop.epochs", None),
        ("name=''", "name", ""),
        ("data.path=*.txt", "data.path", "*.txt"),
        ("data.path=s3://b/k?v=1", "data.path", "s3://b/k?v=1"),
        ("model.note=a: b # c", "model.note", "a: b # c"),
    ],
)
def test_an_override_is_a_key_and_a_value(text: str, key: str, value: Any) -> None:
    found = parse_override(text)
    assert found == (key, value)
    assert is_same(found[1], value)


@pytest.mark.parametrize("text", ["loop.max_steps", "=3", "a..b=3", ".a=3", "a b=3", "a.=1", "1=2", ""])
def test_an_override_without_a_key_is_an_error(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_override(text)
    assert caught.value.key == text
    assert "section.key=value" in caught.value.expected


@pytest.mark.parametrize("text", ["loop.max_steps=", "loop.max_steps= "])
def test_no_value_is_not_null_but_what_a_shell_makes_of_an_unset_variable(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_override(text)
    assert caught.value.key == "loop.max_steps" and caught.value.got == "nothing after the ="
    assert caught.value.expected == "loop.max_steps=VALUE, or loop.max_steps=null for none"


def test_a_broken_value_names_its_key() -> None:
    for text in ("loop.x=[1", "loop.x={a: 1, a: 2}", "loop.x='", "loop.x=" + "9" * 5000):
        with pytest.raises(InputError) as caught:
            parse_override(text)
        assert caught.value.key.startswith("loop.x")


def test_overrides_are_merged_into_a_copy_and_the_last_wins() -> None:
    kept = object()
    given = {"loop": {"epochs": 1}, "data": {"train": kept}, "experts": {"hosts": "auto"}}
    merged, touched = apply_overrides(
        given, ["loop.max_steps=3", "loop.max_steps=4", "experts.hosts.A100=4", "name=x", "optim={lr: 1, eps: 2}"]
    )
    assert merged == {
        "loop": {"epochs": 1, "max_steps": 4},
        "data": {"train": kept},
        "experts": {"hosts": {"A100": 4}},
        "name": "x",
        "optim": {"lr": 1, "eps": 2},
    }
    assert merged["data"]["train"] is kept
    assert touched == {"loop.max_steps", "experts.hosts.A100", "name", "optim.lr", "optim.eps"}
    assert given == {"loop": {"epochs": 1}, "data": {"train": kept}, "experts": {"hosts": "auto"}}


def test_an_override_does_not_hide_an_invalid_section() -> None:
    with pytest.raises(InputError) as caught:
        apply_overrides({"loop": 3}, ["loop.max_steps=3"])
    assert caught.value.key == "loop"


# ---------------------------------------------------------------- sections


@pytest.mark.covers("CFG-18")
def test_an_unknown_or_doubled_key_is_an_error_with_the_nearest_name() -> None:
    """CFG-18: of each key there is one, it is known, and a slip is answered with the key that was meant."""
    error = mistake(LoopConfig, {"max_step": 3})
    assert error.key == "loop.max_step"
    assert "did you mean loop.max_steps?" in str(error)
    assert all(name in error.expected for name in LoopConfig.model_fields)
    with pytest.raises(InputError) as caught:
        load_yaml("loop:\n  max_steps: 1\n  max_steps: 2\n", origin="job.yaml")
    assert caught.value.key == "loop.max_steps"
    assert "each key once" in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        (OptimConfig, "learning_rate", "lr"),
        (OptimConfig, "LR", "lr"),
        (OptimConfig, "beta", "betas"),
        (LoopConfig, "batch_size", "micro_batch_size"),
        (LoopConfig, "eval-every", "eval_every"),
        (ScaleConfig, "num_workers", "workers"),
        (ExpertsConfig, "topk", "top_k"),
    ],
)
def test_the_nearest_key(section: type[Section], key: str, nearest: str) -> None:
    assert f"did you mean x.{nearest}?" in str(mistake(section, {key: 1}, prefix="x"))


def test_a_key_like_no_other_gets_the_list_and_no_guess() -> None:
    assert "did you mean" not in str(mistake(LoopConfig, {"zzz": 1}))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_steps": "7"}, 'loop.max_steps: got "7" (a string), expected an integer >= 1 or null; '
                             "write it without quotes"),
        ({"max_steps": True}, "loop.max_steps: got true (a boolean), expected an integer >= 1 or null; "
                              "for example loop.max_steps=500"),
        ({"log_every": None}, "loop.log_every: got null, expected an integer >= 0 or epoch; "
                              "for example loop.log_every=10, the default"),
        ({"compile": "defalt"}, 'loop.compile: did you mean default? Got "defalt" (a string), expected auto, off, '
                                "default, reduce-overhead or max-autotune"),
        ({"min_delta": math.inf}, "loop.min_delta: got inf (a number), expected a number >= 0; "
                                  "it must be finite"),
        ({"epochs": [1]}, "loop.epochs: got [1] (a list), expected an integer >= 1 or null; "
                          "for example loop.epochs=3"),
    ],
)  # fmt: skip
def test_a_message_names_the_value_and_the_expected_values(values: dict[str, Any], text: str) -> None:
    assert str(mistake(LoopConfig, values)) == text


def test_the_first_mistake_in_the_file_is_reported_and_the_others_are_counted() -> None:
    error = mistake(LoopConfig, {"epochs": 1, "stps": 3, "max_steps": 0, "log_every": "x"})
    assert error.key == "loop.stps"
    assert "also wrong: loop.max_steps, loop.log_every" in str(error)
    assert mistake(LoopConfig, {"log_every": "x", "stps": 3}).key == "loop.log_every"


@pytest.mark.parametrize("values", [3, None, "x", [1], True])
def test_a_section_is_a_mapping(values: Any) -> None:
    error = mistake(LoopConfig, values)
    assert error.key == "loop"
    assert "max_steps" in error.expected


@pytest.mark.parametrize("section", [ModelConfig, DataConfig, LoopConfig])
@pytest.mark.parametrize("key", [3, None, True, 1.5])
def test_a_key_is_an_identifier(section: type[Section], key: Any) -> None:
    assert mistake(section, {key: 1}, prefix="data").key == f"data.{key}"


def test_a_huge_value_and_an_object_are_described_in_short() -> None:
    assert len(mistake(LoopConfig, {"epochs": list(range(10_000))}).got) < 120
    assert mistake(LoopConfig, {"epochs": Path("x")}).got.endswith("(a Python object)")


# ---------------------------------------------------------------- and back


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (OptimConfig, {"betas": [0, 0.5], "lr": 1, "max_grad_norm": None}),
        (ScaleConfig, {"workers": [1, 4]}),
        (ExpertsConfig, {"hosts": {"A100": 4, "T4": 8}, "inflight": 2}),
        (ModelConfig, {"builder": "a:b", "width": 64, "deep": {"x": [1, None, "on"]}}),
        (DataConfig, {"source": "text", "path": ["a", "b"]}),
        (LoopConfig, {}),
    ],
)
def test_encode_and_decode_are_inverse(section: type[Section], values: dict[str, Any]) -> None:
    made = decode(section, values)
    encoded = encode(made)
    assert decode(section, encoded) == made
    assert decode(section, load_yaml(dump_yaml(encoded), origin="job.yaml")) == made


def test_objects_are_encoded_as_placeholders() -> None:
    class MyNet:
        pass

    data = DataConfig(train={"x": MyNet()}, where=Path("data/x"), layer=MyNet())
    encoded = encode(data)
    assert (encoded["train"], encoded["where"], encoded["eval"]) == ("<object dict>", "data/x", None)
    assert encoded["layer"].startswith("<object ") and encoded["layer"].endswith("MyNet>")
    assert encode(decode(DataConfig, encoded)) == encoded
