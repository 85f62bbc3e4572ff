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

SHOWN = 12


def starting_names(model: ModelConfig) -> tuple[str, ...] | None:
    """The names of the classes of the weights that a job starts from; None if they have none."""
    if model.init_from is not None:
        return stored_names(model.init_from)
    loads = model.builder == CLASSIFIER and model.keys.get("init", "weights") == "weights"
    return stored_names(str(model.keys.get("path"))) if loads else None


def stored_names(path: str) -> tuple[str, ...] | None:
    """The names that a run, a checkpoint or a folder of transformers has for its classes; None if it has none, or there
    are no weights at `path`, which those report who read them."""
    try:
        found = find_weights(path, key="model.init_from")
    except InputError:
        return None
    store = found.store
    steps = sorted((entry.name for entry in store.entries("checkpoints")), reverse=True)
    places = [f"checkpoints/{step}/manifest.json" for step in steps]
    for place in (os.path.join(os.path.dirname(found.files[0]), "config.json"), "manifest.json", *places):
        content = json.loads(store.read_bytes(place)) if store.exists(place) else {}
        names = content.get("extra", {}).get("source_facts", {}).get("class_names") or _of_config(content)
        if names:
            return tuple(names)
    return None


def _of_config(config: Mapping[str, Any]) -> list[str] | None:
    """Those of a classifier's config.json; transformers calls classes without names LABEL_0, LABEL_1, ..."""
    numbers = config.get("label2id") or {}
    names = sorted(numbers, key=numbers.__getitem__)
    trained = "SequenceClassification" in str(config.get("architectures"))
    numbered = sorted(numbers.values()) == list(range(len(names)))
    return names if trained and numbered and names != [f"LABEL_{number}" for number in range(len(names))] else None


def check_names(names: Sequence[str] | None, known: Sequence[str] | None, *, key: str, whole: bool = True) -> None:
    """Check that the classes of the data are those of the weights.

    Args:
        names: of the data; None if its labels are numbers.
        known: of the weights, in the order of their numbers; None if they have none.
        whole: all of them, in this order; otherwise any of them.
    Raises:
        InputError: they are not; it shows both.
    """
    if names is None or known is None or (tuple(names) == tuple(known) if whole else {*names} <= {*known}):
        return
    raise InputError(
        key, got=f"the classes {abbreviated(names, SHOWN)}",
        expected=f"those that the weights were trained with: {abbreviated(known, SHOWN)}",
        remedy="rename the classes" if whole else "data.class_names: [...] gives the head's classes new names",
    )  # fmt: skip
