"""Texts through a model's tokenizer: rows, labels, classes, and every mistake before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import SENTENCES, make_folder, texts, write_lines

from jobs.driver.planning import plan_job
from jobs.job.facts import resolved
from jobs.job.spec import load_spec
from raytrain.data.rows.contract import Source
from raytrain.data.sources.open import describe_source, open_source, read_on_driver, source_from_driver
from raytrain.errors import InputError
from raytrain.models.huggingface import encode_text, open_tokenizer
from raytrain.plan.choice import Resolved

pytest.importorskip("transformers", reason="transformers is not installed (the extra `transformers`)")

LM, CLASSIFIER = "raytrain.models.transformers:causal_lm", "raytrain.models.transformers:classifier"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "rows.jsonl", texts(40))


def opened(folder: Path, data: dict[str, Any], *, builder: str = LM, **model: Any) -> Source:
    spec = resolved(load_spec(mapping={"model": {"builder": builder, "path": str(folder), **model}, "data": data}).spec)
    source = open_source(spec.data, context=spec.model.keys.get("context"))
    there = source_from_driver(read_on_driver(spec.data), spec.data, context=spec.model.keys.get("context"))
    assert there is not None and there.facts == source.facts, "what the driver hands over is the same"
    return source


def batch(source: Source, *indices: int) -> dict[str, Any]:
    return source.train.gather(np.array(indices))


def test_a_document_ends_with_the_end_and_is_padded_and_masked(folder: Path, lines: Path) -> None:
    tokenizer = open_tokenizer(str(folder))
    source = opened(folder, {"source": "jsonl", "path": str(lines), "text_field": "text", "eval_fraction": 0.25})
    assert len(source.train) == 30 and source.eval is not None and len(source.eval) == 10
    rows = batch(source, 0, 1, 2)
    for ids, labels, mask in zip(rows["input_ids"], rows["labels"], rows["attention_mask"], strict=True):
        count = int(mask.sum())
        assert tokenizer.decode(ids[:count]).removesuffix("</s>") in "".join(SENTENCES)
        assert ids[count - 1] == tokenizer.eos_token_id and (ids[count:] == tokenizer.pad_token_id).all()
        assert labels[0] == -100 and (labels[count:] == -100).all()
        assert torch.equal(labels[1:count], ids[1:count].long())
    assert source.train.weights(np.array([0, 1, 2])) == int((rows["labels"] != -100).sum())
    assert source.first_labels_ignored and source.vocab_size == len(tokenizer)


def test_a_prompt_is_read_and_not_learned(folder: Path, lines: Path) -> None:
    data = {"source": "jsonl", "path": str(lines), "prompt_field": "prompt", "completion_field": "completion"}
    source = opened(folder, {**data, "eval_fraction": 0.0})
    tokenizer, row = open_tokenizer(str(folder)), batch(source, 3)
    learned = row["input_ids"][0][row["labels"][0] != -100]
    given = row["input_ids"][0][row["labels"][0] == -100]
    assert tokenizer.decode(given) == SENTENCES[3][:9] and tokenizer.decode(learned) == SENTENCES[3][9:29] + "</s>"


def test_packed_rows_hold_the_same_tokens_and_learn_the_same(folder: Path, lines: Path) -> None:
    data = {"source": "jsonl", "path": str(lines), "text_field": "text", "max_length": 48, "eval_fraction": 0.0}
    loose, dense = opened(folder, data), opened(folder, {**data, "packing": "packed"})
    every = np.arange(len(loose.train)), np.arange(len(dense.train))
    assert len(every[1]) < len(every[0]) and dense.train.tokens_per_row == 48
    assert loose.train.weights(every[0]) == dense.train.weights(every[1])
    one, other = loose.train.gather(every[0]), dense.train.gather(every[1])
    learned = [sorted(part["labels"][part["labels"] != -100].tolist()) for part in (one, other)]
    assert learned[0] == learned[1] and set(other) == {"input_ids", "labels", "position_ids"}
    assert "packed into" in dense.describe and "% full" in dense.describe


def test_the_order_is_a_pure_function_of_seed_and_epoch(folder: Path, lines: Path) -> None:
    data = {"source": "jsonl", "path": str(lines), "text_field": "text", "packing": "packed"}
    one, other = opened(folder, data), opened(folder, data)
    assert one.train.order(1, 0).tolist() == other.train.order(1, 0).tolist() != one.train.order(1, 1).tolist()
    assert torch.equal(batch(one, 2)["input_ids"], batch(other, 2)["input_ids"])


def test_a_text_is_cut_into_windows_of_tokens(folder: Path, tiny_text: Path) -> None:
    """As for bytes; labels are the tokens themselves for a model that shifts inside, else the tokens after."""
    same = opened(folder, {"source": "text", "path": str(tiny_text)}, context=16)
    row = batch(same, 5)
    assert torch.equal(row["labels"][0, 1:], row["input_ids"][0, 1:]) and row["labels"][0, 0] == -100
    assert same.train.weights(np.array([5])) == 15 and same.decode is not None
    assert same.decode(row["input_ids"][0].tolist()) in tiny_text.read_text()
    gpt = {"layers": 1, "heads": 1, "width": 8, "context": 16}
    data = {"source": "text", "path": str(tiny_text), "tokenizer": str(folder)}
    spec = resolved(load_spec(mapping={"model": {"builder": "raytrain.models.gpt:gpt", **gpt}, "data": data}).spec)
    after = open_source(spec.data, context=16)
    row = batch(after, 5)
    assert torch.equal(row["labels"][0, :-1], row["input_ids"][0, 1:]) and after.train.weights(np.array([5])) == 16
    assert after.vocab_size == len(open_tokenizer(str(folder))) and not after.first_labels_ignored


def test_a_long_text_tokenized_in_pieces_has_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = open_tokenizer(str(folder))
    text = "\n".join(SENTENCES) + "\n\n  " + "\n".join(SENTENCES)
    whole = encode_text(tokenizer, text)
    monkeypatch.setattr("raytrain.models.huggingface.PIECE", 20)
    assert encode_text(tokenizer, text).tolist() == whole.tolist() and tokenizer.decode(whole) == text


def sentencepiece(folder: Path, *, merged: bool = False) -> Path:
    """A tokenizer as of Llama, which puts a space before a text, and has a token for a line break; `merged`: also for
    one with the letter after it."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefgh"]
    vocabulary = {token: number for number, token in enumerate([*letters, "\u2581a", "ab", "\u2581ab", "\n", "\na"])}
    merges = [*([("\n", "a")] if merged else []), ("\u2581", "a"), ("a", "b"), ("\u2581a", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


def test_pieces_of_a_long_text_get_no_space_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = open_tokenizer(str(sentencepiece(tmp_path)))
    text = "ab cd\nab\n\nefgh ab\n  ab\nabab ab\nh\ncd" * 30
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    for piece, context in ((7, 3), (40, 1000), (90, 1)):
        monkeypatch.setattr("raytrain.models.huggingface.PIECE", piece)
        monkeypatch.setattr("raytrain.models.huggingface.CONTEXT", context)
        assert encode_text(tokenizer, text).tolist() == expected
    assert encode_text(tokenizer, "").tolist() == [] and tokenizer.decode(expected) == text
    tokenizer = open_tokenizer(str(sentencepiece(tmp_path / "merged", merged=True)))
    assert tokenizer.decode(encode_text(tokenizer, text)).replace(" ", "") == text.replace(" ", "")


def test_whole_numbers_of_19_digits_are_names_of_classes(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": "one", "class": 2**70}, {"text": "two", "class": 7}, {"text": "three", "class": 2**70 + 1}]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    data = {"source": "jsonl", "path": str(path), "text_field": "text", "label_field": "class", "eval_fraction": 0.0}
    source = opened(folder, data, builder=CLASSIFIER)
    assert source.class_names == (str(2**70), str(2**70 + 1), "7") and batch(source, 0, 1, 2)["labels"].tolist() == [
        0, 2, 1
    ]  # fmt: skip


def test_classes_are_numbered_and_named(folder: Path, lines: Path) -> None:
    data = {"source": "jsonl", "path": str(lines), "text_field": "text", "label_field": "class", "eval_fraction": 0.0}
    source = opened(folder, data, builder=CLASSIFIER)
    assert (source.classes, source.class_names, source.decode) == (4, ("a", "b", "c", "d"), None)
    rows = batch(source, 0, 1, 2, 3)
    assert rows["labels"].tolist() == [0, 1, 2, 3] and rows["labels"].dtype == torch.int64
    assert rows["attention_mask"].shape == rows["input_ids"].shape


def test_a_plan_opens_no_files_and_states_the_number_of_epochs(folder: Path, lines: Path) -> None:
    data = {"source": "jsonl", "path": str(lines), "text_field": "text"}
    loaded = load_spec(mapping={"model": {"builder": LM, "path": str(folder), "freeze": "model.embed*"}, "data": data})
    spec = resolved(loaded.spec)
    assert describe_source(spec.data, context=None) is None
    plan = plan_job(loaded)
    assert isinstance(plan.parameters, Resolved) and plan.parameters.reason.endswith("; 15,520 of them trained")
    assert spec.data.keys["max_length"] == 64, "the most that the model takes, below the usual 512"


GOOD = {"source": "jsonl", "text_field": "text"}
MISTAKES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text with a classifier": ("data.source", {"builder": CLASSIFIER}, {"source": "text"}),
    "no field": ("data.packing", {}, {"source": "jsonl", "packing": "packed"}),
    "half a pair": ("data.prompt_field", {}, {"source": "jsonl", "prompt_field": "prompt"}),
    "a table's key": ("data.label", {}, {**GOOD, "label": "class"}),
    "packed classes": ("data.packing", {"builder": CLASSIFIER}, {**GOOD, "label_field": "class", "packing": "packed"}),
    "a class for a language model": ("data.label_field", {}, {**GOOD, "label_field": "class"}),
    "a classifier without classes": ("data.label_field", {"builder": CLASSIFIER}, GOOD),
    "longer than the model": ("data.max_length", {}, {**GOOD, "max_length": 65}),
    "no length": ("data.max_length", {}, {**GOOD, "max_length": 1}),
    "a packing of another kind": ("data.packing", {}, {**GOOD, "packing": "dense"}),
    "no such tokenizer": ("data.tokenizer", {}, {**GOOD, "tokenizer": "nowhere"}),
    "no such field": ("data.text_field", {}, {"source": "jsonl", "text_field": "txt"}),
    "both kinds of tokens": ("data.vocabulary", {}, {"source": "text", "vocabulary": "chars", "tokenizer": "auto"}),
    "packed without position_ids": (
        "data.packing", {"builder": "raytrain.models.gpt:gpt"}, {**GOOD, "packing": "packed"},
    ),
    "auto without a folder": (
        "data.tokenizer", {"builder": "raytrain.models.gpt:gpt", "path": None}, {**GOOD, "tokenizer": "auto"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_before_anything_starts(folder: Path, lines: Path, mistake: str) -> None:
    key, model, data = MISTAKES[mistake]
    given = {"builder": LM, "path": str(folder), **model}
    mapping = {"model": {k: v for k, v in given.items() if v is not None}, "data": {"path": str(lines), **data}}
    with pytest.raises(InputError) as error:
        spec = resolved(load_spec(mapping=mapping).spec)
        describe_source(spec.data, context=None)
        open_source(spec.data, context=None)
    assert error.value.key == key


LINES = {
    "no JSON": ('{"text": "a"}\nnonsense\n', "line 2 of .* which is not valid JSON"),
    "no object": ("[1]\n", "line 1 of .* is a list"),
    "no text": ('{"text": 3}\n', "got 3 as 'text' in line 1"),
    "no such field": ('{"text": "a"}\n{"txt": "b"}\n', "did you mean txt. Got 'text', which is missing in line 2 "),
    "nothing to learn": ('{"text": ""}\n', "no row with a label to learn"),
    "no row": ("\n\n", "0 rows"),
}


@pytest.mark.parametrize("kind", LINES)
def test_a_bad_line_is_named(folder: Path, tmp_path: Path, kind: str) -> None:
    content, says = LINES[kind]
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(InputError, match=says):
        opened(folder, {**GOOD, "path": str(tmp_path / "bad.jsonl"), "eval_fraction": 0.0})


def test_labels_of_two_kinds_are_refused(folder: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mixed.jsonl", [{"text": "a", "y": 1}, {"text": "b", "y": "x"}])
    with pytest.raises(InputError, match=r"data.label_field: got both whole numbers and strings"):
        opened(folder, {**GOOD, "label_field": "y", "path": str(path)}, builder=CLASSIFIER)


def test_a_broken_tokenizer_is_reported(tmp_path: Path, lines: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"nothing": True}))
    with pytest.raises(InputError, match=r"data.tokenizer: got .*, expected a local folder with a tokenizer"):
        opened(tmp_path, {**GOOD, "path": str(lines), "tokenizer": str(tmp_path)}, builder="raytrain.models.gpt:gpt")
