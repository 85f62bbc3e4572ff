"""Text as tokens (bytes or characters), from files or memory, and the source text of Python's own standard library.

`open.py` calls `text_source` for `data.source: text` and `stdlib`; `tokenised.py` reads its files with the same
functions.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cluster.wording import counted
from raytrain.config.messages import describe
from raytrain.data.rows.contract import Source
from raytrain.data.sources.sections import STDLIB_MAX_BYTES
from raytrain.errors import InputError
from raytrain.plan.facts import DataFacts
from raytrain.runs.storage import read_bytes

# ---------------------------------------------------------------- text


@dataclass(frozen=True)
class ByteVocabulary:
    """256 tokens, one for each byte of UTF-8 text."""

    size: int = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text; invalid UTF-8 becomes the replacement character."""
        return bytes(tokens).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class CharVocabulary:
    """One token for each character of the text, ordered by code point."""

    characters: str

    @property
    def size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        """Encode a text. Raises InputError for a character that is not in the training text."""
        unknown = sorted(set(text) - set(self.characters))
        if unknown:
            raise InputError(
                "data.vocabulary",
                got=f"the character {unknown[0]!r}",
                expected=f"one of the {self.size} characters of the training text",
            )
        numbers = {character: number for number, character in enumerate(self.characters)}
        return [numbers[character] for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.characters[token] for token in tokens)


def check_context(context: object) -> int:
    """Return the window length. Raises InputError unless `model.context` is a number of tokens: a source reads it
    before the builder, which has its own check."""
    if isinstance(context, int) and not isinstance(context, bool) and context >= 1:
        return context
    if context is not None:
        raise InputError("model.context", got=describe(context), expected="an integer >= 1")
    raise InputError(
        "model.context",
        got="no value",
        expected="a number of tokens",
        remedy="text is split into windows of model.context tokens",
    )


def text_facts(
    train: int, evaluation: int, *, context: int, token_bytes: int, vocab_size: int | None, reason: str, key: str
) -> DataFacts:
    """Return the sizes of a text of `train` and `evaluation` tokens (0 = no evaluation). Raises InputError: fewer
    than two windows of training tokens (the offset of an epoch may skip up to one), or fewer than one window plus
    one token of evaluation tokens."""
    needs = {"training": (train, 2 * context)}
    if evaluation:
        needs["evaluation"] = (evaluation, context + 1)
    for use, (tokens, least) in needs.items():
        if tokens < least:
            raise InputError(
                key,
                got=f"{tokens:,} tokens for {use}",
                expected=f"at least {least:,} with model.context {context}",
                remedy="give more text, or a smaller model.context or data.eval_fraction",
            )
    return DataFacts(
        train_rows=(train - context) // context,
        eval_rows=max(evaluation - 1, 0) // context,
        row_bytes=context * token_bytes,
        tokens_per_row=context,
        total_bytes=(train + evaluation) * token_bytes,
        vocab_size=vocab_size,
        reason=reason,
    )


def cut(tokens: int, fraction: float) -> int:
    """Return the index of the first evaluation token; the last `fraction` of the text is held out."""
    return int(tokens * (1 - fraction))


def describe_bytes(
    size: int,
    eval_size: int = 0,
    *,
    context: int | None,
    fraction: float,
    vocabulary: str = "bytes",
    origin: str,
    key: str = "data.path",
) -> DataFacts:
    """Return the sizes of a text of `size` bytes; an upper bound for the character vocabulary."""
    train, evaluation = (size, eval_size) if eval_size else (cut(size, fraction), size - cut(size, fraction))
    is_bytes = vocabulary == "bytes"
    return text_facts(
        train,
        evaluation,
        context=check_context(context),
        token_bytes=1,
        vocab_size=256 if is_bytes else None,
        reason=_sentence(origin, train, evaluation, unit="bytes" if is_bytes else "characters at most"),
        key=key,
    )


def files_text(paths: list[str]) -> str:
    return f"text {paths[0]}" if len(paths) == 1 else f"text of {counted(len(paths), 'file')}"


def _sentence(origin: str, train: int, evaluation: int, *, unit: str) -> str:
    kept = f"{evaluation:,} of them for evaluation" if evaluation else "none for evaluation"
    return f"{origin}: {train + evaluation:,} {unit}, {kept}"


def open_text(
    paths: list[str], eval_paths: list[str], *, context: int | None, fraction: float, vocabulary: str,
    same_labels: bool = False,
) -> Source:  # fmt: skip
    """Open text files, concatenated in the order given without separators."""
    check_context(context)
    texts = [read_bytes(path, key="data.path") for path in paths]
    eval_texts = [read_bytes(path, key="data.eval_path") for path in eval_paths]
    if vocabulary == "chars":
        for path, text in zip(paths + eval_paths, texts + eval_texts, strict=True):
            _check_utf8(text, path)
    return text_source(
        b"".join(texts),
        eval_text=b"".join(eval_texts) if eval_paths else None,
        context=context,
        eval_fraction=fraction,
        vocabulary=vocabulary,
        origin=files_text(paths),
        same_labels=same_labels,
    )


def _check_utf8(text: bytes, path: str) -> None:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            "data.vocabulary",
            got=f"chars, and byte {error.start} of {path} is not valid UTF-8",
            expected="UTF-8 text",
            remedy="vocabulary: bytes accepts any file",
        ) from error


def text_source(
    text: bytes,
    *,
    context: int | None,
    vocabulary: str = "bytes",
    eval_fraction: float = 0.1,
    eval_text: bytes | None = None,
    origin: str = "text in memory",
    key: str = "data.path",
    same_labels: bool = False,
) -> Source:
    """Return a source of text in memory: UTF-8, or any bytes with the vocabulary "bytes"; "chars" are all characters of
    both texts. Without `eval_text`, the last `eval_fraction` of the tokens is held out. `same_labels`: see
    `TextSplit`."""
    from raytrain.data.rows.splits import TextSplit

    length = check_context(context)
    windows = partial(TextSplit, context=length, key=key, same_labels=same_labels)
    codec: Any
    if vocabulary == "bytes":
        codec, tokens, eval_tokens = ByteVocabulary(), _bytes(text), None if eval_text is None else _bytes(eval_text)
    else:
        for part in (text, eval_text or b""):
            _check_utf8(part, origin)
        codec, tokens, eval_tokens = _characters(text, eval_text)
    if eval_tokens is None:
        at = cut(len(tokens), eval_fraction)
        tokens, eval_tokens = tokens[:at], tokens[at:]
    unit = "bytes" if vocabulary == "bytes" else f"characters ({codec.size} different ones)"
    reason = _sentence(origin, len(tokens), len(eval_tokens), unit=unit)
    facts = text_facts(
        len(tokens),
        len(eval_tokens),
        context=length,
        token_bytes=tokens.dtype.itemsize,
        vocab_size=codec.size,
        reason=reason,
        key=key,
    )
    return Source(
        train=windows(tokens),
        eval=windows(eval_tokens) if len(eval_tokens) else None,
        vocab_size=codec.size,
        facts=facts,
        decode=codec.decode,
        encode=codec.encode,
        describe=reason,
        first_labels_ignored=same_labels,
        reads={"characters": codec.characters} if vocabulary == "chars" else {},
    )


def _bytes(text: bytes) -> np.ndarray:
    """Return writable tokens (one copy): torch does not support read-only memory."""
    return np.frombuffer(bytearray(text), dtype=np.uint8)


def _characters(text: bytes, eval_text: bytes | None) -> tuple[CharVocabulary, np.ndarray, np.ndarray | None]:
    """Return the vocabulary of both texts, and their tokens in the smallest integer type that holds them."""
    parts = [part.decode("utf-8") for part in (text, eval_text) if part is not None]
    codes = [np.frombuffer(part.encode("utf-32-le"), dtype=np.uint32) for part in parts]
    top = max((int(part.max()) for part in codes if len(part)), default=0)
    present = np.zeros(top + 1, dtype=bool)
    for part in codes:
        present[part] = True
    found = np.flatnonzero(present)
    kind = np.uint8 if len(found) <= 2**8 else np.uint16 if len(found) <= 2**16 else np.int32
    numbers = np.zeros(top + 1, dtype=kind)
    numbers[found] = np.arange(len(found))
    codec = CharVocabulary("".join(map(chr, found.tolist())))
    return codec, numbers[codes[0]], numbers[codes[1]] if len(codes) > 1 else None


# ---------------------------------------------------------------- stdlib
# The source `stdlib`: the source text of Python's own standard library.


# Folders that some Python builds lack; the rest is the same text for the same Python version.
STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "lib2to3", "__pycache__"}
)
STDLIB = "the source text of Python's standard library"


def stdlib_files(max_bytes: int = STDLIB_MAX_BYTES) -> tuple[list[Path], int]:
    """Return the standard library's source files, sorted, up to `max_bytes`, and their total bytes. Raises
    InputError: this Python has no source files (for example an embedded build)."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in STDLIB_LEFT_OUT)
        found += [Path(folder) / name for name in files if name.endswith(".py")]
    chosen, total = [], 0
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        if total >= max_bytes:
            break
        size = path.stat().st_size
        if size:
            chosen.append(path)
            total += size
    if not chosen:
        raise InputError("data.source", got=f"no Python source text in {root}", expected="the standard library")
    return chosen, total


def read_stdlib(max_bytes: int = STDLIB_MAX_BYTES) -> bytes:
    """Return the source text of Python's standard library: sorted by path, UTF-8, truncated to `max_bytes`.

    The bytes are the same for the same Python version. Machines may have different versions, so the driver reads the
    text and sends it to the workers (`raytrain.data.sources.open.read_on_driver`).
    """
    parts, total = [], 0
    # Files that are not UTF-8 are skipped, so twice the bytes are listed.
    for path in stdlib_files(max_bytes * 2)[0]:
        if total >= max_bytes:
            break
        text = path.read_bytes()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            continue
        parts.append(text)
        total += len(text)
    return b"".join(parts)[:max_bytes]
