"""Local folders of transformers models, read without torch: config, sizes, checks, and the tokenizer.

The driver calls it before torch is loaded, to plan, check and tokenize; `raytrain.models.transformers` builds the
model.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from raytrain.config.messages import abbreviated
from raytrain.config.sections import ModelConfig
from raytrain.errors import InputError, first_line
from raytrain.models.sizes import FLOAT_BYTES, missing_key, unknown_key
from raytrain.models.weights.headers import find_weights
from raytrain.plan.facts import ModelFacts

if TYPE_CHECKING:
    import numpy as np

# ---------------------------------------------------------------- folder
# Read the config and sizes of a local transformers folder, and check it, without torch.


CAUSAL_LM = "raytrain.models.transformers:causal_lm"
CLASSIFIER = "raytrain.models.transformers:classifier"
KEYS = {
    CAUSAL_LM: ("path", "context", "init", "freeze", "vocab_size"),
    CLASSIFIER: ("path", "num_labels", "init", "freeze", "num_classes", "class_names", "vocab_size"),
}
"""The builders for such folders, and their keys."""

FOLDER_EXPECTED = "a local folder that save_pretrained of transformers wrote"
POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_PADDED_POSITIONS = re.compile(r"position_embeddings = [\w.]*Embedding\([^()]*padding_idx")
_PADDING = re.compile(r"self\.padding_idx = (\d+)")


def check_installed(value: str, *, key: str = "model.builder") -> None:
    """Raise InputError if the optional package is not installed. `value`: of the key, which needs it."""
    if importlib.util.find_spec("transformers") is None:
        raise InputError(
            key,
            got=f"{value}, and transformers is not installed",
            expected="transformers 5 or newer",
            remedy="pip install 'raytrain[transformers]'",
        )


def read_config(path: Any) -> dict[str, Any]:
    """Return the config.json of a transformers folder. Raises InputError: `path` is not such a folder; nothing is
    downloaded."""
    if not isinstance(path, str) or not path:
        raise InputError("model.path", got=repr(path), expected=FOLDER_EXPECTED)
    if not os.path.isdir(path):
        seen = f"a file at {path}" if os.path.exists(path) else f"no folder at {path}"
        raise InputError("model.path", got=seen, expected=FOLDER_EXPECTED, remedy="nothing is downloaded")
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError as error:
        raise InputError("model.path", got=f"no config.json in {path}", expected=FOLDER_EXPECTED) from error
    except (OSError, ValueError) as error:
        raise InputError(
            "model.path", got=f"{path}/config.json: {first_line(error)}", expected=FOLDER_EXPECTED
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InputError("model.path", got=f"no model_type in {path}/config.json", expected=FOLDER_EXPECTED)
    return config


def longest_input(config: Mapping[str, Any]) -> int | None:
    """Return the maximum number of input tokens in a model's config, or None. RoBERTa's do not use all positions."""
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, Mapping) else [config]
    for place in places:
        for key in POSITION_KEYS:
            if isinstance(place.get(key), int) and place[key] > 0:
                return max(place[key] - _first_position(config, place), 1)
    return None


def _first_position(config: Mapping[str, Any], place: Mapping[str, Any]) -> int:
    """The position of the first token: as transformers' code for the model makes it, 0 if that is not installed."""
    code = _model_code(str(config.get("model_type")))
    if "create_position_ids_from_input_ids" not in code or not _PADDED_POSITIONS.search(code):
        return 0
    written = _PADDING.search(code)  # MPNet's is a number, whatever its padding token
    padding = written[1] if written else place.get("pad_token_id", 1)  # the default of all of them
    return 0 if padding is None else int(padding) + 1


@cache
def _model_code(model_type: str) -> str:
    """The file that defines a kind of model, as text, since to import it takes torch; "" if there is none."""
    package = importlib.util.find_spec("transformers")
    name = f"modeling_{glob.escape(model_type.replace('-', '_'))}.py"
    for root in (package.submodule_search_locations if package else None) or ():
        for path in glob.glob(os.path.join(root, "models", "*", name)):
            with open(path, encoding="utf-8") as file:
                return file.read()
    return ""


def check_patterns(patterns: Any) -> list[str]:
    """`model.freeze` as a list. Raises InputError unless all are strings."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(listed, Sequence) or not all(isinstance(one, str) and one for one in listed):
        raise InputError("model.freeze", got=repr(patterns), expected="a list of patterns such as model.layers.0.*")
    return list(listed)


def is_frozen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter's full name matches one of the patterns (* and ? as in a shell)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def folder_facts(builder: str | None, keys: Mapping[str, Any]) -> ModelFacts | None:
    """Return the sizes of a model in a folder, from the headers of its files. Returns None for any other builder,
    and for random weights, which have no file. Raises InputError: an unknown or missing key, no such folder, or no
    weights in it."""
    if builder not in KEYS:
        return None
    accepted = KEYS[builder]
    for name in keys:
        if name not in accepted:
            raise unknown_key("model", name, builder, accepted)
    if "path" not in keys:
        raise missing_key("model", "path", builder, accepted)
    check_installed(builder)
    read_config(keys["path"])
    patterns = check_patterns(keys.get("freeze", ()))
    if keys.get("init", "weights") != "weights":
        return None
    stored = find_weights(keys["path"], key="model.path")
    frozen = sum(
        math.prod(shape)
        for name, shape in stored.shapes.items()
        if name not in stored.aliases and is_frozen(name, patterns)
    )
    head = "; the head is new" if builder == CLASSIFIER else ""
    return ModelFacts(
        parameters=stored.parameters,
        trainable_bytes=FLOAT_BYTES * (stored.parameters - frozen),
        activation_bytes_per_sample=None,
        flops_per_sample=None,
        reason=f"headers of the files in {keys['path']}{head}",
    )


# ---------------------------------------------------------------- class names
# The names of the classes that stored weights answer with, in the order of their numbers.


def starting_names(model: ModelConfig) -> tuple[str, ...] | None:
    """The names of the classes of the weights that a job starts from; None if they have none."""
    loads = model.builder == CLASSIFIER and model.keys.get("init", "weights") == "weights"
    path = model.init_from or (model.keys.get("path") if loads else None)
    return None if path is None else stored_names(str(path))


def stored_names(path: str) -> tuple[str, ...] | None:
    """The names that a run, a checkpoint or a folder of transformers has for its classes; None if it has none, or there
    are no weights at `path`, which those report who read them."""
    try:
        found = find_weights(path, key="model.init_from")
    except InputError:
        return None
    store = found.store
    places = [f"checkpoints/{step.name}/manifest.json" for step in reversed(store.entries("checkpoints"))]
    for place in (os.path.join(os.path.dirname(found.files[0]), "config.json"), "manifest.json", *places):
        content = json.loads(store.read_bytes(place)) if store.exists(place) else {}
        names = content.get("extra", {}).get("source_facts", {}).get("class_names") or _of_config(content)
        if names:
            return tuple(names)
    return None


def _of_config(config: Mapping[str, Any]) -> list[str] | None:
    """Those of a classifier's config.json; transformers calls classes without names LABEL_0, LABEL_1, ..."""
    if "SequenceClassification" not in str(config.get("architectures")):
        return None  # its head is new
    numbers, named = config.get("label2id") or {}, config.get("id2label") or {}
    for pairs in ([(numbers[name], name) for name in numbers], [(int(number), named[number]) for number in named]):
        names = [name for place, (number, name) in enumerate(sorted(pairs)) if number == place]
        if len(names) == len(pairs) and names != [f"LABEL_{place}" for place in range(len(names))]:
            return names
    return None


def check_names(names: Sequence[str] | None, known: Sequence[str] | None, *, key: str, whole: bool = True) -> None:
    """Raise InputError unless the classes of the data are those of the weights, in their order, or some of them where
    they need not be the `whole`. None has no names, and fits all."""
    if names is None or known is None or (tuple(names) == tuple(known) if whole else {*names} <= {*known}):
        return
    raise InputError(
        key, got=f"the classes {abbreviated(names, 12)}",
        expected=f"those of the weights that it starts from: {abbreviated(known, 12)}",
        remedy="rename the classes" if whole else "data.class_names: [...] gives the classes of the head other names",
    )  # fmt: skip


# ---------------------------------------------------------------- tokenizer
# Tokenizers in local transformers folders; an optional extra, nothing is downloaded.


FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tokenizer_config.json",  # the only one of those without a vocabulary, as ByT5's
)  # fmt: skip
"""Every folder with a tokenizer has one of these files."""

TOKENIZER_EXPECTED = "a local folder with a tokenizer that save_pretrained of transformers wrote"
TEXTS_AT_ONCE = 1000
PIECE = 2**20
_NEXT_LINE = re.compile(r"\n(?=\S)")
CONTEXT = 1000
"""Characters before a piece of a long text that are encoded with it."""


def has_tokenizer(path: str) -> bool:
    return any(os.path.isfile(os.path.join(path, name)) for name in FILES)


def check_tokenizer(path: str, *, key: str = "data.tokenizer") -> None:
    """Raise InputError if the folder holds no tokenizer or transformers is not installed."""
    if not has_tokenizer(path):
        seen = f"no tokenizer in {path}" if os.path.isdir(path) else f"no folder at {path}"
        raise InputError(key, got=seen, expected=TOKENIZER_EXPECTED, remedy="nothing is downloaded")
    check_installed(path, key=key)


@lru_cache(maxsize=4)
def open_tokenizer(path: str, *, key: str = "data.tokenizer") -> Any:
    """Open the tokenizer in `path`, cached per process. Raises InputError."""
    check_tokenizer(path, key=key)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # a broken file can raise any exception
        seen = f"{path}: {type(error).__name__}: {first_line(error)}"
        raise InputError(key, got=seen, expected=TOKENIZER_EXPECTED) from error


def pad_id(tokenizer: Any) -> int:
    """Return the padding token; it is masked, so any token works."""
    return next((int(one) for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)


def _batches(tokenizer: Any, texts: Sequence[str], **options: Any) -> Iterator[Mapping[str, Any]]:
    """What the tokenizer makes of `TEXTS_AT_ONCE` texts after another."""
    plain = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        yield tokenizer(list(texts[start : start + TEXTS_AT_ONCE]), **plain, **options)


def encode_rows(
    tokenizer: Any, texts: Sequence[str], *, special: bool, max_length: int | None = None
) -> list[np.ndarray]:
    """Return the tokens of each text, int32. `special`: add the tokenizer's special tokens. `max_length`: truncate
    to this length; the tokenizer keeps its special tokens at the end."""
    import numpy as np  # here: the keys above are read with every job

    cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
    made = _batches(tokenizer, texts, add_special_tokens=special, **cut)
    return [np.asarray(ids, dtype=np.int32) for batch in made for ids in batch["input_ids"]]


def encode_prompts(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the tokens that a model reads before it writes, int32: those of `tokenizer(text)`, such as its begin token
    and the text, without an end token that it appends. A text that begins with the begin token, as chat templates
    write it, or ends with the end token keeps exactly that one."""
    made = _batches(tokenizer, texts, return_special_tokens_mask=True)
    rows = (row for one in made for row in zip(one["input_ids"], one["special_tokens_mask"], strict=True))
    return [_opened(tokenizer, *row) for row in rows]


def _opened(tokenizer: Any, ids: list[int], added: list[int]) -> np.ndarray:
    """The tokens of one text: `added` is 1 for those that are not in the text itself."""
    import numpy as np

    front = next((place for place, own in enumerate(added) if not own), len(ids))
    first = front if ids[front : front + 1] == ids[:1] else 0  # the text has what the tokenizer puts in front of it
    end = len(ids)
    least = int(bool(ids) and ids[0] == tokenizer.bos_token_id)  # which may be the end token, too
    while end > least and added[end - 1] and ids[end - 1] == tokenizer.eos_token_id:
        end -= 1
    return np.asarray(ids[first:end], dtype=np.int32)


def ended(tokenizer: Any, ids: np.ndarray) -> np.ndarray:
    """The tokens with the tokenizer's end token behind them, if it has one and they do not end with it."""
    import numpy as np

    end = tokenizer.eos_token_id
    return ids if end is None or (len(ids) and ids[-1] == end) else np.append(ids, np.int32(end))


def encode_text(tokenizer: Any, text: str) -> np.ndarray:
    """Return the tokens of one long text, int32, without special tokens.

    The text is encoded in pieces of about a mebibyte. Each starts after a line break with a non-space character, where
    no tokenizer that splits at spaces merges anything. It is encoded together with the characters before it, whose
    tokens are cut off again: at the beginning of a text some tokenizers (SentencePiece's) add a space.
    """
    import numpy as np

    starts = [0]
    while starts[-1] + PIECE < len(text):
        found = _NEXT_LINE.search(text, starts[-1] + PIECE)
        starts.append(found.end() if found else len(text))
    rows = list[np.ndarray]()
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        before, piece = text[max(0, start - CONTEXT) : start], text[start:end]
        row, known = encode_rows(tokenizer, [before + piece, before if start else ""], special=False)
        if start and np.array_equal(row[: len(known)], known):
            row = row[len(known) :]
        elif start:  # something was merged over the line break after all
            (row,) = encode_rows(tokenizer, [piece], special=False)
        rows.append(row)
    return np.concatenate(rows)


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
