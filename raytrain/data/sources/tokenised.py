"""Text and JSON lines tokenized with a model's tokenizer, once on the driver, which sends the tokens to the workers.

From lines to rows: what a line holds, which tokens are learned, how rows are truncated and documents packed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from raytrain.config.messages import abbreviated, suggestion
from raytrain.config.sections import DataConfig, ModelConfig
from raytrain.data.rows.contract import IGNORED_LABEL, Source, facts_of, holdout
from raytrain.data.sources.sections import as_paths, source_keys
from raytrain.data.sources.tables import CODES_FROM, TableColumns, check_classes
from raytrain.data.sources.text import check_context, cut, text_facts
from raytrain.errors import InputError
from raytrain.models import huggingface as hf
from raytrain.models.huggingface import (
    CAUSAL_LM,
    CLASSIFIER,
    KEYS,
    check_names,
    longest_input,
    read_config,
    starting_names,
)
from raytrain.runs.storage import read_bytes

# ---------------------------------------------------------------- jsonl
# Read texts from JSON lines: each line is a document, a prompt with its completion, or a text with its class.


def read_fields(paths: Sequence[str], *, fields: Mapping[str, str], key: str) -> dict[str, list[Any]]:
    """Return the columns of the files, by key of the `data` section. `fields`: key of the section ("text_field",
    ...) -> the field name in each line. `key`: the config key that errors about files name. Raises InputError: no
    lines, or a line that is not a JSON object, lacks a field, or has a value of the wrong type."""
    columns: dict[str, list[Any]] = {name: [] for name in fields}
    for path in paths:
        for number, line in enumerate(read_bytes(path, key=key, unpack=True).split(b"\n"), start=1):
            if not line.strip():
                continue
            where = f"line {number} of {path}"
            try:
                row = json.loads(line)
            except ValueError as error:
                seen = f"{where}, which is not valid JSON ({error})"
                raise InputError(key, got=seen, expected="one JSON object per line") from error
            if not isinstance(row, dict):
                raise InputError(key, got=f"{where} is a {type(row).__name__}", expected="a JSON object")
            for name, field in fields.items():
                if field not in row:
                    raise InputError(
                        f"data.{name}", got=f"'{field}', which is missing in {where}",
                        expected=f"one of {', '.join(row) or 'some fields'}", remedy=suggestion(field, row),
                    )  # fmt: skip
                value, is_class = row[field], name == "label_field"
                if not isinstance(value, str) and not (is_class and type(value) is int):
                    expected = "a class, as a whole number or a string" if is_class else "a string"
                    raise InputError(f"data.{name}", got=f"{value!r} as '{field}' in {where}", expected=expected)
                columns[name].append(value)
    if not next(iter(columns.values())):
        raise InputError(key, got=f"0 rows in {', '.join(paths)}", expected="at least one row")
    return columns


def class_numbers(
    columns: Sequence[list[Any]], known: Sequence[str] | str = "auto"
) -> tuple[list[np.ndarray], int, tuple[str, ...] | None]:
    """Return the labels of each column as class numbers (int64), the number of classes, and their names.

    String labels are numbered in the order of `known`; with "auto" in sorted order over all columns. Whole numbers are
    those of the classes, of which there are as many as `known` has names; with 19 digits or more they are names.
    """
    kinds = {type(value) for column in columns for value in column}
    if kinds == {int} and any(abs(value) >= CODES_FROM for column in columns for value in column):
        columns, kinds = [[str(value) for value in column] for column in columns], {str}
    if len(kinds) > 1:
        raise InputError("data.label_field", got="both whole numbers and strings", expected="one kind of label")
    if kinds == {str}:
        names = sorted({value for column in columns for value in column})
        if known != "auto":
            check_names(names, known, key="data.label_field", whole=False)
            names = list(known)
        numbers = {name: number for number, name in enumerate(names)}
        found = [np.array([numbers[value] for value in column], np.int64) for column in columns]
        return found, len(names), tuple(names)
    found = [np.array(column, np.int64) for column in columns]
    for column in found:
        check_classes(column, name="label_field", key="data.label_field")
    classes = max(int(column.max()) for column in found) + 1
    if known == "auto":
        return found, classes, None
    if classes > len(known):
        raise InputError(
            "data.label_field", got=f"class {classes - 1}", expected=f"0 to {len(known) - 1}: {abbreviated(known, 12)}",
            remedy="data.class_names: [...] names all classes",
        )  # fmt: skip
    return found, len(known), None


# ---------------------------------------------------------------- documents
# Turn tokenized documents into rows: which tokens are learned, how rows are truncated, how documents are packed.


@dataclass(frozen=True)
class Document:
    """Tokens of one document; the first `given` of them (a prompt) are not learned."""

    ids: np.ndarray
    given: int = 0


@dataclass(frozen=True)
class Row:
    """Input tokens and their labels: int32 arrays of equal length."""

    ids: np.ndarray
    labels: np.ndarray


def to_row(document: Document, *, max_length: int, same_labels: bool) -> Row | None:
    """Truncate a document to a row of at most `max_length` tokens; None if no label is left to learn. `same_labels`:
    labels equal the tokens, with the first set to -100, for a model that shifts them itself; otherwise each label is
    the next token."""
    ids = document.ids[: max_length + (not same_labels)]
    labels = ids.copy()
    labels[: document.given] = IGNORED_LABEL
    labels[:1] = IGNORED_LABEL
    if not same_labels:
        ids, labels = ids[:-1], labels[1:]
    return Row(ids, labels) if (labels != IGNORED_LABEL).any() else None


def padded(rows: Sequence[Row]) -> TableColumns:
    """Rows of different lengths; they are padded when a batch is made."""
    return TableColumns(ragged={"input_ids": joined([row.ids for row in rows]),
                                "labels": joined([row.labels for row in rows])})  # fmt: skip


def joined(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the arrays; returns the values and the offset of each array."""
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])
    return np.concatenate(parts), offsets


def packed(rows: Sequence[Row], *, length: int, pad: int) -> TableColumns:
    """Pack several documents into each row of `length`: input_ids, labels, position_ids that restart per document.

    The rest of a row is padding with label -100 and positions of its own.
    """
    places = share_rows(np.array([len(row.ids) for row in rows]), room=length)
    ids = np.full((len(places), length), pad, np.int32)
    labels = np.full((len(places), length), IGNORED_LABEL, np.int32)
    positions = np.zeros((len(places), length), np.int32)
    for number, held in enumerate(places):
        at = 0
        for document in held:
            row = rows[document]
            end = at + len(row.ids)
            ids[number, at:end], labels[number, at:end] = row.ids, row.labels
            positions[number, at:end] = np.arange(end - at)
            at = end
        positions[number, at:] = np.arange(length - at)
    return TableColumns(dense={"input_ids": ids, "labels": labels, "position_ids": positions})


def share_rows(lengths: np.ndarray, *, room: int) -> list[list[int]]:
    """Assign documents to rows: longest first, each into the fullest row that still has room (best-fit decreasing).
    `lengths`: none longer than `room`."""
    held: list[list[int]] = []
    rows_with: list[list[int]] = [[] for _ in range(room + 1)]  # indexed by the room left
    left = 0  # bit s is set if some row has room s left, so the smallest sufficient room is found in one step
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        enough = left >> length
        if enough:
            space = length + (enough & -enough).bit_length() - 1
            row = rows_with[space].pop()
            if not rows_with[space]:
                left &= ~(1 << space)
        else:
            space, row = room, len(held)
            held.append([])
        held[row].append(document)
        rows_with[space - length].append(row)
        if space > length:
            left |= 1 << (space - length)
    return held


# ---------------------------------------------------------------- tokenised


FIELDS = ("text_field", "prompt_field", "completion_field", "label_field")


@dataclass(frozen=True)
class Tokenised:
    tokenizer: str  # folder of the tokenizer
    vocab_size: int  # number of tokens in its vocabulary
    pad: int  # the token that rows are padded with
    # train, eval: one long text as (N,) tokens, or columns of rows; `eval` is None if nothing is held out
    train: np.ndarray | TableColumns
    eval: np.ndarray | TableColumns | None
    describe: str  # a one-line description for messages
    same_labels: bool = False  # labels are the input_ids (`TextSplit`)
    row_length: int | None = None  # tokens per row, None if rows have different lengths
    # classes, class_names: as in `Source`
    classes: int | None = None
    class_names: tuple[str, ...] | None = None


def is_tokenised(data: DataConfig) -> bool:
    is_text = data.train is None and data.source in ("text", "jsonl")
    return is_text and any(data.keys.get(name) is not None for name in ("tokenizer", *FIELDS))


def tokenise(data: DataConfig) -> Tokenised:
    """Read and tokenize all files; a pure function of the files and the section. Raises InputError: there is no
    tokenizer, or the files are invalid."""
    keys = source_keys(data)
    tokenizer = hf.open_tokenizer(keys["tokenizer"])
    read = _text if data.source == "text" else _classes if keys["label_field"] is not None else _documents
    found = read(keys, tokenizer, fraction=data.eval_fraction)
    pad = hf.pad_id(tokenizer)
    return Tokenised(tokenizer=keys["tokenizer"], vocab_size=len(tokenizer), pad=pad, **found)


def tokenised_source(found: Tokenised, *, context: int | None) -> Source:
    """Return the source of these tokens. Raises InputError if a text is too short for `model.context`."""
    codec = hf.TextCodec(found.tokenizer)
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
        assert train is not None, "text_facts rejects a text without tokens"
        return Source(train, evaluation, facts=facts, decode=codec.decode, encode=codec.encode, **common)
    from raytrain.data.sources.in_memory import table_split

    split = partial(table_split, tokens_per_row=found.row_length, fills={"input_ids": found.pad})
    train, evaluation = split(found.train), split(found.eval) if isinstance(found.eval, TableColumns) else None
    facts = facts_of(train, evaluation, reason=found.describe, vocab_size=found.vocab_size)
    written = {} if found.classes is not None else {"decode": codec.decode, "encode": codec.encode}
    named = {"classes": found.classes, "class_names": found.class_names}
    return Source(train, evaluation, facts=facts, **written, **named, **common)


# ---------------------------------------------------------------- one long text


def _text(keys: Mapping[str, Any], tokenizer: Any, *, fraction: float) -> dict[str, Any]:
    tokens = _tokens_of(as_paths(keys["path"]), tokenizer, key="data.path")
    eval_paths = as_paths(keys["eval_path"])
    if eval_paths:
        others = _tokens_of(eval_paths, tokenizer, key="data.eval_path")
    else:
        at = cut(len(tokens), fraction)
        tokens, others = tokens[:at], tokens[at:]
    kept = f"{len(others):,} of them for evaluation" if len(others) else "none for evaluation"
    describe = f"text {', '.join(as_paths(keys['path']))}: {len(tokens) + len(others):,} tokens, {kept}"
    return {"train": tokens, "eval": others, "describe": describe, "same_labels": keys["labels"] == "same"}


def _tokens_of(paths: Sequence[str], tokenizer: Any, *, key: str) -> np.ndarray:
    """Tokenize files, concatenated in the order given without separators."""
    texts = []
    for path in paths:
        try:
            texts.append(read_bytes(path, key=key).decode("utf-8"))
        except UnicodeDecodeError as error:
            seen = f"byte {error.start} of {path}, which is not valid UTF-8"
            raise InputError(key, got=seen, expected="UTF-8 text") from error
    tokens = hf.encode_text(tokenizer, "".join(texts))
    return tokens.astype(np.uint16) if len(tokenizer) <= 2**16 else tokens


# ---------------------------------------------------------------- rows of JSON lines


def _documents(keys: Mapping[str, Any], tokenizer: Any, *, fraction: float) -> dict[str, Any]:
    """Tokenize documents, or prompts with completions; they are held out by document, before packing."""
    same, length = keys["labels"] == "same", int(keys["max_length"])
    documents = _encoded(_columns(keys, "path"), tokenizer)
    if keys["eval_path"] is not None:
        parts = [documents, _encoded(_columns(keys, "eval_path"), tokenizer)]
    else:
        parts = [[documents[row] for row in part] for part in holdout(len(documents), fraction)]
    rows = [[to_row(one, max_length=length, same_labels=same) for one in part] for part in parts]
    kept = [[row for row in part if row is not None] for part in rows]
    if not kept[0]:
        seen, expected = "no row with a label to learn", "texts of at least two tokens, and prompts shorter than this"
        raise InputError("data.max_length", got=seen, expected=expected)
    lost = sum(map(len, rows)) - sum(map(len, kept))
    limit = length + (not same)
    shortened = sum(len(one.ids) > limit for part in parts for one in part)
    notes = [f"{len(kept[0]):,} texts to train on, {len(kept[1]):,} for evaluation"]
    share = keys["packing"] == "packed"
    to_columns = partial(packed, length=length, pad=hf.pad_id(tokenizer)) if share else padded
    train, evaluation = (to_columns(part) if part else None for part in kept)
    if share and train is not None:
        ids, tokens = train.dense["input_ids"], sum(len(row.ids) for row in kept[0])
        notes.append(f"packed into {len(ids):,} rows of {ids.shape[1]}, {tokens / ids.size:.0%} full")
    notes += [f"{shortened:,} truncated to data.max_length {length}"] if shortened else []
    notes += [f"{lost:,} skipped (no label to learn)"] if lost else []
    return {
        "train": train, "eval": evaluation, "same_labels": same, "row_length": length if share else None,
        "describe": f"jsonl {', '.join(as_paths(keys['path']))}: {'; '.join(notes)}",
    }  # fmt: skip


def _encoded(columns: Mapping[str, list[Any]], tokenizer: Any) -> list[Document]:
    """Tokenize each line; a completion or text ends with the tokenizer's end token if it has one."""
    if "text_field" in columns:
        return [Document(hf.ended(tokenizer, ids)) for ids in hf.encode_prompts(tokenizer, columns["text_field"])]
    prompts = hf.encode_prompts(tokenizer, columns["prompt_field"])
    answers = hf.encode_rows(tokenizer, columns["completion_field"], special=False)
    return [
        Document(np.concatenate([prompt, hf.ended(tokenizer, answer)]), given=len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _classes(keys: Mapping[str, Any], tokenizer: Any, *, fraction: float) -> dict[str, Any]:
    names = [name for name in ("path", "eval_path") if keys[name] is not None]
    columns = [_columns(keys, name) for name in names]
    labels = [part["label_field"] for part in columns]
    numbers, classes, class_names = class_numbers(labels, keys["class_names"])
    parts: list[list[tuple[np.ndarray, int]]] = []
    for part, own in zip(columns, numbers, strict=True):
        ids = hf.encode_rows(tokenizer, part["text_field"], special=True, max_length=int(keys["max_length"]))
        parts.append(list(zip(ids, own.tolist(), strict=True)))
    if len(parts) == 1:
        parts = [[parts[0][row] for row in part] for part in holdout(len(parts[0]), fraction)]
    train, evaluation = (
        TableColumns(
            dense={"labels": np.array([label for _, label in part], np.int64)},
            ragged={"input_ids": joined([ids for ids, _ in part])},
        )
        if part
        else None
        for part in parts
    )
    summary = f"{len(parts[0]):,} texts of {classes} classes to train on, {len(parts[1]):,} for evaluation"
    return {
        "train": train, "eval": evaluation, "classes": classes, "class_names": class_names,
        "describe": f"jsonl {', '.join(as_paths(keys['path']))}: {summary}",
    }  # fmt: skip


def _columns(keys: Mapping[str, Any], name: str) -> dict[str, list[Any]]:
    fields = {field: keys[field] for field in FIELDS if keys[field] is not None}
    return read_fields(as_paths(keys[name]), fields=fields, key=f"data.{name}")


USUAL_LENGTH = 512
ROW_KEYS = ("class_names", "tokenizer", "max_length", "packing", "labels")


def resolve_text_keys(data: DataConfig, model: ModelConfig) -> DataConfig:
    """Return the section with every `auto` value for text resolved; other sections are unchanged. `model`: the
    `model` section, with absolute paths. Raises InputError: conflicting keys, or rows longer than the model accepts."""
    if data.train is not None or data.source not in ("text", "jsonl"):
        return data
    keys = source_keys(data)
    changed = _resolve_text(data, keys, model) if data.source == "text" else _resolve_rows(data, keys, model)
    return data.model_copy(update=changed) if changed else data


def _resolve_text(data: DataConfig, keys: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    if model.builder == CLASSIFIER:
        raise InputError("data.source", got="text with a classifier", expected="jsonl with text_field and label_field")
    folder = keys["tokenizer"]
    if folder is None and model.builder == CAUSAL_LM and "vocabulary" not in data.keys:
        folder = "auto"
    if folder is not None and "vocabulary" in data.keys:
        raise InputError("data.vocabulary", got="both this key and data.tokenizer", expected="only one of them")
    labels = _resolve_labels(keys["labels"], model, usual="next")
    changed = {} if folder is None else {"tokenizer": _resolve_tokenizer(folder, model)}
    return changed if folder is None and labels == "next" else {**changed, "labels": labels}


def _resolve_rows(data: DataConfig, keys: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    fields = [name for name in FIELDS if keys[name] is not None]
    if not fields:
        extra = next((name for name in ROW_KEYS if name in data.keys), None)
        if extra is not None:
            expected = "data.text_field as well, or data.prompt_field and data.completion_field"
            raise InputError(f"data.{extra}", got="this key without a text field", expected=expected)
        return {}
    expected = "text_field, text_field and label_field, or prompt_field and completion_field"
    if fields not in (["text_field"], ["text_field", "label_field"], ["prompt_field", "completion_field"]):
        raise InputError(f"data.{fields[-1]}", got=" and ".join(fields), expected=expected)
    for name in ("features", "label"):
        if name in data.keys:
            raise InputError(f"data.{name}", got=f"both this key and data.{fields[0]}", expected="only one of them",
                             remedy="for the class of a text, use data.label_field")  # fmt: skip
    classes = "label_field" in fields
    if not classes and "class_names" in data.keys:
        raise InputError("data.class_names", got="this key without data.label_field", expected="both, or none")
    if classes and keys["packing"] == "packed":
        raise InputError("data.packing", got="packed with data.label_field", expected="padded: one text per row")
    if _is_ours(model) and model.builder not in KEYS and keys["packing"] == "packed":
        raise InputError("data.packing", got=f"packed with {model.builder}, which does not support position_ids",
                         expected="padded", remedy="the texts of a row would attend to each other")  # fmt: skip
    if model.builder in KEYS and classes is (model.builder == CAUSAL_LM):
        name = (model.builder or "").rpartition(":")[2]
        seen = f"{' and '.join(fields)} with {name}"
        raise InputError("data.label_field", got=seen, expected="label_field with classifier, and only there")
    names = starting_names(model) if classes and keys["class_names"] == "auto" else None
    tokenizer = _resolve_tokenizer(keys["tokenizer"] or "auto", model)
    length, context = keys["max_length"], model.keys.get("context")
    if context is not None:
        check_context(context)
    most = longest_input(read_config(model.keys.get("path"))) if model.builder in KEYS else context
    if length == "auto":
        wanted = context or USUAL_LENGTH
        length = min(wanted, most) if isinstance(most, int) else wanted
    elif isinstance(most, int) and length > most:
        raise InputError("data.max_length", got=str(length), expected=f"at most {most}, the limit of the model",
                         remedy="longer texts are truncated")  # fmt: skip
    return {
        **({} if names is None else {"class_names": list(names)}),
        "tokenizer": tokenizer,
        "max_length": length,
        "labels": _resolve_labels(keys["labels"], model, usual="same"),
    }


def _resolve_tokenizer(given: str, model: ModelConfig) -> str:
    """Return the tokenizer's folder; auto is the model's folder."""
    if given != "auto":
        return given
    path = model.keys.get("path")
    if isinstance(path, str):
        return path
    raise InputError("data.tokenizer", got="auto for a model without a folder (model.path)",
                     expected="a folder with a tokenizer")  # fmt: skip


def _resolve_labels(given: str, model: ModelConfig, *, usual: str) -> str:
    """Return "next" (labels are the next tokens, for built-in models) or "same" (transformers models shift them)."""
    if given != "auto":
        return given
    if model.builder in KEYS:
        return "same"
    return "next" if _is_ours(model) else usual


def _is_ours(model: ModelConfig) -> bool:
    return (model.builder or "").startswith(("raytrain.", "experts."))
