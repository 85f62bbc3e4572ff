"""Tokenizers in local transformers folders; an optional extra, nothing is downloaded. Torch-free."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from raytrain.errors import InputError, first_line

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
"""Every folder with a tokenizer has one of these files."""

EXPECTED = "a local folder with a tokenizer that save_pretrained of transformers wrote"
TEXTS_AT_ONCE = 1000
PIECE = 2**20


def has_tokenizer(path: str) -> bool:
    """Whether a folder holds a tokenizer's files."""
    return any(os.path.isfile(os.path.join(path, name)) for name in FILES)


def check_tokenizer(path: str, *, key: str = "data.tokenizer") -> None:
    """Raise InputError if the folder holds no tokenizer or transformers is not installed."""
    if not has_tokenizer(path):
        seen = f"no tokenizer in {path}" if os.path.isdir(path) else f"no folder at {path}"
        raise InputError(key, got=seen, expected=EXPECTED, remedy="nothing is downloaded")
    if importlib.util.find_spec("transformers") is None:
        raise InputError(key, got=f"{path}, and transformers is not installed", expected="transformers 5 or newer",
                         remedy="pip install 'raytrain[transformers]'")  # fmt: skip


@lru_cache(maxsize=4)
def open_tokenizer(path: str, *, key: str = "data.tokenizer") -> Any:
    """Open the tokenizer in `path`, cached per process. Raises InputError."""
    check_tokenizer(path, key=key)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # a broken file can raise any exception
        seen = f"{path}: {type(error).__name__}: {first_line(error)}"
        raise InputError(key, got=seen, expected=EXPECTED) from error


def pad_id(tokenizer: Any) -> int:
    """Return the padding token; it is masked, so any token works."""
    for known in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if known is not None:
            return int(known)
    return 0


def encode_rows(
    tokenizer: Any, texts: Sequence[str], *, special: bool, max_length: int | None = None
) -> list[np.ndarray]:
    """Return the tokens of each text, int32.

    Args:
        special: add the tokenizer's special tokens.
        max_length: truncate to this length; the tokenizer keeps its special tokens at the end.
    """
    cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
    rows: list[np.ndarray] = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        made = tokenizer(
            list(texts[start : start + TEXTS_AT_ONCE]), add_special_tokens=special, return_attention_mask=False,
            return_token_type_ids=False, verbose=False, **cut,
        )  # fmt: skip
        rows += [np.asarray(ids, dtype=np.int32) for ids in made["input_ids"]]
    return rows


def encode_prompts(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the tokens that a model reads before it writes, int32: those of `tokenizer(text)`, such as its begin token
    and the text, without an end token that it appends. A text that begins with the begin token, as chat templates
    write it, or ends with the end token keeps exactly that one."""
    rows: list[np.ndarray] = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        made = tokenizer(
            list(texts[start : start + TEXTS_AT_ONCE]), return_attention_mask=False, return_token_type_ids=False,
            return_special_tokens_mask=True, verbose=False,
        )  # fmt: skip
        rows += [_opened(tokenizer, *row) for row in zip(made["input_ids"], made["special_tokens_mask"], strict=True)]
    return rows


def _opened(tokenizer: Any, ids: list[int], added: list[int]) -> np.ndarray:
    """The tokens of one text: `added` is 1 for those that are not in the text itself."""
    front = next((place for place, own in enumerate(added) if not own), len(ids))
    first = front if ids[front : front + 1] == ids[:1] else 0  # the text has what the tokenizer puts in front of it
    end = len(ids)
    least = int(bool(ids) and ids[0] == tokenizer.bos_token_id)  # which may be the end token, too
    while end > least and added[end - 1] and ids[end - 1] == tokenizer.eos_token_id:
        end -= 1
    return np.asarray(ids[first:end], dtype=np.int32)


def ended(tokenizer: Any, ids: np.ndarray) -> np.ndarray:
    """The tokens with the tokenizer's end token behind them, if it has one and they do not end with it."""
    end = tokenizer.eos_token_id
    return ids if end is None or (len(ids) and ids[-1] == end) else np.append(ids, np.int32(end))


def encode_text(tokenizer: Any, text: str) -> np.ndarray:
    """Return the tokens of one long text, int32, without special tokens.

    The text is encoded in pieces of about a mebibyte. Each starts after a line break with a non-space character, where
    no tokenizer that splits at spaces merges anything.
    """
    starts, at = [0], 0
    while at + PIECE < len(text):
        at = _next_line(text, at + PIECE)
        starts.append(at)
    pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    rows = [encode_rows(tokenizer, [piece], special=False)[0] for piece in pieces if piece]
    return np.concatenate(rows) if rows else np.empty(0, np.int32)


def _next_line(text: str, at: int) -> int:
    while True:
        found = text.find("\n", at)
        if found < 0:
            return len(text)
        at = found + 1
        if at < len(text) and not text[at].isspace():
            return at


@dataclass(frozen=True)
class TextCodec:
    """Converts tokens to text, and prompts to tokens, with the tokenizer in a folder, which is opened on first use;
    `plain` without special tokens, which a chat template writes itself."""

    path: str
    plain: bool = False

    def decode(self, tokens: list[int]) -> str:
        return str(open_tokenizer(self.path).decode(tokens))

    def encode(self, text: str) -> list[int]:
        tokenizer = open_tokenizer(self.path)
        rows = encode_rows(tokenizer, [text], special=False) if self.plain else encode_prompts(tokenizer, [text])
        return rows[0].tolist()
