"""The names of the classes that stored weights answer with, in the order of their numbers. Torch-free."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from raytrain.config.messages import abbreviated
from raytrain.config.sections import ModelConfig
from raytrain.errors import InputError
from raytrain.models.huggingface.folder import CLASSIFIER
from raytrain.models.weights.headers import find_weights


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
