"""Text and JSON lines through a model's own tokenizer: once, on the driver, which hands the tokens to the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from raytrain.data.rows.contract import RowSplit, Source, facts_of, holdout
from raytrain.data.sources.columns import TableColumns
from raytrain.data.sources.documents import Document, Row, joined, packed, padded, to_row
from raytrain.data.sources.jsonl import class_numbers, read_fields
from raytrain.data.sources.keys import as_paths, source_keys
from raytrain.data.sources.text import check_context, cut, text_facts
from raytrain.errors import InputError
from raytrain.models.huggingface.tokenizer import Words, encode_rows, encode_text, open_tokenizer, pad_id
from raytrain.runs.storage import read_bytes

if TYPE_CHECKING:
    from raytrain.config.sections import DataConfig

FIELDS = ("text_field", "prompt_field", "completion_field", "label_field")


@dataclass(frozen=True)
class Tokenised:
    """A source's tokens, on the host.

    Attributes:
        tokenizer: its folder.
        vocab_size: tokens it knows. pad: the one that rows are padded with.
        train, eval: one long text as (N,) tokens, or columns of rows; `eval` is None where nothing is held out.
        describe: one line for people.
        same_labels: labels are the input_ids (`TextSplit`).
        row_length: tokens of every row, None where rows differ.
        classes, class_names: as in `Source`.
    """

    tokenizer: str
    vocab_size: int
    pad: int
    train: np.ndarray | TableColumns
    eval: np.ndarray | TableColumns | None
    describe: str
    same_labels: bool = False
    row_length: int | None = None
    classes: int | None = None
    class_names: tuple[str, ...] | None = None


def is_tokenised(data: DataConfig) -> bool:
    """Whether a section's text goes through a tokenizer."""
    asked = data.train is None and data.source in ("text", "jsonl")
    return asked and any(data.keys.get(name) is not None for name in ("tokenizer", *FIELDS))


def tokenise(data: DataConfig) -> Tokenised:
    """Read and encode everything; a pure function of the files and the section.

    Raises:
        InputError: no tokenizer, or whatever is wrong with the files.
    """
    keys = source_keys(data)
    tokenizer = open_tokenizer(keys["tokenizer"])
    if data.source == "text":
        return _text(keys, tokenizer, fraction=data.eval_fraction)
    if keys["label_field"] is not None:
        return _classes(keys, tokenizer, fraction=data.eval_fraction)
    return _documents(keys, tokenizer, fraction=data.eval_fraction)


def tokenised_source(found: Tokenised, *, context: int | None) -> Source:
    """The source of these tokens. Raises InputError for a text that is too short for `model.context`."""
    words = Words(found.tokenizer)
    common: dict[str, Any] = {
        "describe": found.describe, "tokenizer": found.tokenizer, "first_labels_ignored": found.same_labels,
        "vocab_size": found.vocab_size,
    }  # fmt: skip
    if isinstance(found.train, np.ndarray):
        from raytrain.data.rows.splits import TextSplit

        length = check_context(context)
        others = found.eval if isinstance(found.eval, np.ndarray) else np.empty(0, found.train.dtype)
        facts = text_facts(
            len(found.train), len(others), context=length, token_bytes=found.train.dtype.itemsize,
            vocab_size=found.vocab_size, reason=found.describe, key="data.path",
        )  # fmt: skip
        train, evaluation = (
            TextSplit(tokens, context=length, same_labels=found.same_labels) if len(tokens) else None
            for tokens in (found.train, others)
        )
        assert train is not None, "text_facts has refused a text without tokens"
        return Source(train, evaluation, facts=facts, decode=words.decode, encode=words.encode, **common)
    train = _split(found.train, found)
    evaluation = _split(found.eval, found) if isinstance(found.eval, TableColumns) else None
    facts = facts_of(train, evaluation, reason=found.describe, vocab_size=found.vocab_size)
    written = {} if found.classes is not None else {"decode": words.decode, "encode": words.encode}
    named = {"classes": found.classes, "class_names": found.class_names}
    return Source(train, evaluation, facts=facts, **written, **named, **common)


def _split(columns: TableColumns, found: Tokenised) -> RowSplit:
    from raytrain.data.rows.ragged import Ragged, RaggedSplit
    from raytrain.data.rows.splits import TensorSplit, host_tensor

    dense = {name: host_tensor(values) for name, values in columns.dense.items()}
    split = TensorSplit(dense, tokens_per_row=found.row_length) if dense else None
    if not columns.ragged:
        assert split is not None, "rows have columns"
        return split
    ragged = {name: Ragged(host_tensor(values), offsets) for name, (values, offsets) in columns.ragged.items()}
    return RaggedSplit(ragged, dense=split, fills={"input_ids": found.pad})


# ---------------------------------------------------------------- one long text


def _text(keys: Mapping[str, Any], tokenizer: Any, *, fraction: float) -> Tokenised:
    tokens = _tokens_of(as_paths(keys["path"]), tokenizer, key="data.path")
    eval_paths = as_paths(keys["eval_path"])
    if eval_paths:
        others = _tokens_of(eval_paths, tokenizer, key="data.eval_path")
    else:
        at = cut(len(tokens), fraction)
        tokens, others = tokens[:at], tokens[at:]
    kept = f"{len(others):,} of them for evaluation" if len(others) else "none for evaluation"
    return Tokenised(
        tokenizer=keys["tokenizer"],
        vocab_size=len(tokenizer),
        pad=pad_id(tokenizer),
        train=tokens,
        eval=others,
        describe=f"text {', '.join(as_paths(keys['path']))}: {len(tokens) + len(others):,} tokens, {kept}",
        same_labels=keys["labels"] == "same",
    )


def _tokens_of(paths: Sequence[str], tokenizer: Any, *, key: str) -> np.ndarray:
    """Files joined in the order given, nothing between them."""
    tokens = encode_text(tokenizer, "".join(_decoded(path, key=key) for path in paths))
    return tokens.astype(np.uint16) if len(tokenizer) <= 2**16 else tokens


def _decoded(path: str, *, key: str) -> str:
    try:
        return read_bytes(path, key=key).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(key, seen=f"byte {error.start} of {path}, which is no UTF-8", expected="UTF-8 text") from error


# ---------------------------------------------------------------- rows of JSON lines


def _documents(keys: Mapping[str, Any], tokenizer: Any, *, fraction: float) -> Tokenised:
    """Documents, or prompts with completions; held out by document, before any of them share a row."""
    same, length = keys["labels"] == "same", int(keys["max_length"])
    parts = _held_out(keys, lambda columns: _encoded(columns, tokenizer), fraction=fraction)
    rows = [[to_row(one, max_length=length, same_labels=same) for one in part] for part in parts]
    kept = [[row for row in part if row is not None] for part in rows]
    if not kept[0]:
        seen, expected = "no row in which anything is left to learn", "texts of two tokens, prompts shorter than this"
        raise InputError("data.max_length", seen=seen, expected=expected)
    lost = sum(map(len, rows)) - sum(map(len, kept))
    limit = length + (not same)
    shortened = sum(len(one.ids) > limit for part in parts for one in part)
    share = keys["packing"] == "packed"
    train, evaluation = (_laid_out(part, keys, tokenizer) if part else None for part in kept)
    assert train is not None, "there are rows to train on"
    notes = [f"{len(kept[0]):,} texts to train on, {len(kept[1]):,} for evaluation"]
    notes += [_filled(train, kept[0])] if share else []
    notes += [f"{shortened:,} cut at data.max_length {length}"] if shortened else []
    notes += [f"{lost:,} left out (nothing to learn in them)"] if lost else []
    return Tokenised(
        tokenizer=keys["tokenizer"],
        vocab_size=len(tokenizer),
        pad=pad_id(tokenizer),
        train=train,
        eval=evaluation,
        describe=f"jsonl {', '.join(as_paths(keys['path']))}: {'; '.join(notes)}",
        same_labels=same,
        row_length=length if share else None,
    )


def _laid_out(rows: Sequence[Row], keys: Mapping[str, Any], tokenizer: Any) -> TableColumns:
    if keys["packing"] == "packed":
        return packed(rows, length=int(keys["max_length"]), pad=pad_id(tokenizer))
    return padded(rows)


def _filled(columns: TableColumns, rows: Sequence[Row]) -> str:
    ids = columns.dense["input_ids"]
    return f"packed into {len(ids):,} rows of {ids.shape[1]}, {sum(len(row.ids) for row in rows) / ids.size:.0%} full"


def _encoded(columns: Mapping[str, list[Any]], tokenizer: Any) -> list[Document]:
    """Each line as tokens; a completion, or a text, ends with the tokenizer's end where it has one."""
    end = [] if tokenizer.eos_token_id is None else [np.int32(tokenizer.eos_token_id)]
    fronts = encode_rows(tokenizer, columns.get("text_field") or columns["prompt_field"], special=True)
    if end:
        fronts = [ids[:-1] if len(ids) and ids[-1] == end[0] else ids for ids in fronts]
    if "text_field" in columns:
        return [Document(np.concatenate([ids, end]).astype(np.int32)) for ids in fronts]
    answers = encode_rows(tokenizer, columns["completion_field"], special=False)
    return [
        Document(np.concatenate([prompt, answer, end]).astype(np.int32), given=len(prompt))
        for prompt, answer in zip(fronts, answers, strict=True)
    ]


def _classes(keys: Mapping[str, Any], tokenizer: Any, *, fraction: float) -> Tokenised:
    """Texts with one class each."""
    length = int(keys["max_length"])
    columns = _columns(keys, "path")
    others = _columns(keys, "eval_path") if keys["eval_path"] is not None else None
    numbers, classes, names = class_numbers([part["label_field"] for part in (columns, others) if part is not None])

    def rows(part: Mapping[str, list[Any]], labels: np.ndarray) -> list[tuple[np.ndarray, int]]:
        ids = encode_rows(tokenizer, part["text_field"], special=True, max_length=length)
        return list(zip(ids, labels.tolist(), strict=True))

    train = rows(columns, numbers[0])
    evaluation = rows(others, numbers[1]) if others is not None else []
    if others is None:
        first, held = holdout(len(train), fraction)
        train, evaluation = [train[row] for row in first], [train[row] for row in held]
    told = f"{len(train):,} texts of {classes} classes to train on, {len(evaluation):,} for evaluation"
    return Tokenised(
        tokenizer=keys["tokenizer"],
        vocab_size=len(tokenizer),
        pad=pad_id(tokenizer),
        train=_class_columns(train),
        eval=_class_columns(evaluation) if evaluation else None,
        describe=f"jsonl {', '.join(as_paths(keys['path']))}: {told}",
        classes=classes,
        class_names=names,
    )


def _class_columns(rows: Sequence[tuple[np.ndarray, int]]) -> TableColumns:
    labels = np.array([label for _, label in rows], np.int64)
    return TableColumns(dense={"labels": labels}, ragged={"input_ids": joined([ids for ids, _ in rows])})


def _columns(keys: Mapping[str, Any], name: str) -> dict[str, list[Any]]:
    fields = {field: keys[field] for field in FIELDS if keys[field] is not None}
    return read_fields(as_paths(keys[name]), fields=fields, key=f"data.{name}")


def _held_out(
    keys: Mapping[str, Any], encoded: Callable[[Mapping[str, list[Any]]], list[Document]], *, fraction: float
) -> tuple[list[Document], list[Document]]:
    train = encoded(_columns(keys, "path"))
    if keys["eval_path"] is not None:
        return train, encoded(_columns(keys, "eval_path"))
    first, held = holdout(len(train), fraction)
    return [train[row] for row in first], [train[row] for row in held]
