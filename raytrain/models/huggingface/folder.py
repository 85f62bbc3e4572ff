"""Read the config and sizes of a local transformers folder, and check it, without torch."""

from __future__ import annotations

import glob
import importlib.util
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from raytrain.errors import InputError, first_line
from raytrain.models.sizes import FLOAT_BYTES, missing_key, unknown_key
from raytrain.models.weights.headers import find_weights
from raytrain.plan.facts import ModelFacts

CAUSAL_LM = "raytrain.models.transformers:causal_lm"
CLASSIFIER = "raytrain.models.transformers:classifier"
KEYS = {
    CAUSAL_LM: ("path", "context", "init", "freeze", "vocab_size"),
    CLASSIFIER: ("path", "num_labels", "init", "freeze", "num_classes", "class_names", "vocab_size"),
}
"""The builders for such folders, and their keys."""

EXPECTED = "a local folder that save_pretrained of transformers wrote"
POSITION_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_PADDED_POSITIONS = re.compile(r"position_embeddings = [\w.]*Embedding\([^()]*padding_idx")
_PADDING = re.compile(r"self\.padding_idx = (\d+)")


def check_installed(builder: str) -> None:
    """Raise InputError if the optional package is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise InputError(
            "model.builder",
            got=f"{builder}, and transformers is not installed",
            expected="transformers 5 or newer",
            remedy="pip install 'raytrain[transformers]'",
        )


def read_config(path: Any) -> dict[str, Any]:
    """Return the config.json of a transformers folder.

    Raises:
        InputError: `path` is not such a folder; nothing is downloaded.
    """
    if not isinstance(path, str) or not path:
        raise InputError("model.path", got=repr(path), expected=EXPECTED)
    if not os.path.isdir(path):
        seen = f"a file at {path}" if os.path.exists(path) else f"no folder at {path}"
        raise InputError("model.path", got=seen, expected=EXPECTED, remedy="nothing is downloaded")
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError as error:
        raise InputError("model.path", got=f"no config.json in {path}", expected=EXPECTED) from error
    except (OSError, ValueError) as error:
        raise InputError("model.path", got=f"{path}/config.json: {first_line(error)}", expected=EXPECTED) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InputError("model.path", got=f"no model_type in {path}/config.json", expected=EXPECTED)
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
    """Return the sizes of a model in a folder, from the headers of its files.

    Returns:
        None for any other builder, and for random weights, which have no file.
    Raises:
        InputError: an unknown or missing key, no such folder, or no weights in it.
    """
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
