"""What a section of texts takes from the model: its tokenizer, the length of its rows, how labels stand to tokens.

Torch-free; done once, on the driver, before anything reads the data.
"""

from __future__ import annotations

from typing import Any

from raytrain.config.sections import DataConfig, ModelConfig
from raytrain.data.sources.keys import source_keys
from raytrain.errors import InputError
from raytrain.models.huggingface.folder import CAUSAL_LM, CLASSIFIER, KEYS, longest_input, read_config

USUAL_LENGTH = 512
FIELDS = ("text_field", "prompt_field", "completion_field", "label_field")
ROW_KEYS = ("tokenizer", "max_length", "packing", "labels")


def settle_language(data: DataConfig, model: ModelConfig) -> DataConfig:
    """The section with every `auto` about text in its place; any other section as it is.

    Args:
        model: relative paths in it have been made absolute.
    Raises:
        InputError: keys that do not go together, or a row longer than the model takes.
    """
    if data.train is not None or data.source not in ("text", "jsonl"):
        return data
    keys = source_keys(data)
    changed = _text(data, keys, model) if data.source == "text" else _rows(data, keys, model)
    return data.model_copy(update=changed) if changed else data


def _text(data: DataConfig, keys: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    if model.builder == CLASSIFIER:
        raise InputError("data.source", seen="text with a classifier", expected="jsonl with text_field and label_field")
    folder = keys["tokenizer"]
    if folder is None and model.builder == CAUSAL_LM and "vocabulary" not in data.keys:
        folder = "auto"
    if folder is not None and "vocabulary" in data.keys:
        raise InputError("data.vocabulary", seen="it beside data.tokenizer", expected="one of them")
    labels = _labels(keys["labels"], model, usual="next")
    changed = {} if folder is None else {"tokenizer": _folder(folder, model)}
    return changed if folder is None and labels == "next" else {**changed, "labels": labels}


def _rows(data: DataConfig, keys: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    fields = [name for name in FIELDS if keys[name] is not None]
    if not fields:
        beside = next((name for name in ROW_KEYS if name in data.keys), None)
        if beside is not None:
            expected = "data.text_field with it, or data.prompt_field and data.completion_field"
            raise InputError(f"data.{beside}", seen="it without a field of texts", expected=expected)
        return {}
    _check_fields(data, keys, fields, model)
    return {
        "tokenizer": _folder(keys["tokenizer"] or "auto", model),
        "max_length": _length(keys["max_length"], model),
        "labels": _labels(keys["labels"], model, usual="same"),
    }


def _check_fields(data: DataConfig, keys: dict[str, Any], fields: list[str], model: ModelConfig) -> None:
    expected = "text_field, text_field and label_field, or prompt_field and completion_field"
    if fields not in (["text_field"], ["text_field", "label_field"], ["prompt_field", "completion_field"]):
        raise InputError(f"data.{fields[-1]}", seen=" and ".join(fields), expected=expected)
    for name in ("features", "label"):
        if name in data.keys:
            raise InputError(f"data.{name}", seen=f"it beside data.{fields[0]}", expected="one of them",
                             remedy="a class of texts is data.label_field")  # fmt: skip
    classes = "label_field" in fields
    if classes and keys["packing"] == "packed":
        raise InputError("data.packing", seen="packed with data.label_field", expected="padded: one text a row")
    if _is_ours(model) and model.builder not in KEYS and keys["packing"] == "packed":
        raise InputError("data.packing", seen=f"packed with {model.builder}, which knows no position_ids",
                         expected="padded", remedy="the texts of a row would read each other")  # fmt: skip
    if model.builder in KEYS and classes is (model.builder == CAUSAL_LM):
        name = (model.builder or "").rpartition(":")[2]
        seen = f"{' and '.join(fields)} with {name}"
        raise InputError("data.label_field", seen=seen, expected="label_field with classifier, and with it alone")


def _folder(given: str, model: ModelConfig) -> str:
    """The tokenizer's folder; auto is the model's."""
    if given != "auto":
        return given
    path = model.keys.get("path")
    if isinstance(path, str):
        return path
    raise InputError("data.tokenizer", seen="auto with a model without a folder of its own (model.path)",
                     expected="a folder with a tokenizer")  # fmt: skip


def _labels(given: str, model: ModelConfig, *, usual: str) -> str:
    """Next: the token after each, as our own models read labels; same: a model of transformers shifts inside."""
    if given != "auto":
        return given
    if model.builder in KEYS:
        return "same"
    return "next" if _is_ours(model) else usual


def _is_ours(model: ModelConfig) -> bool:
    return (model.builder or "").startswith(("raytrain.", "experts."))


def _length(given: Any, model: ModelConfig) -> int:
    most = longest_input(read_config(model.keys.get("path"))) if model.builder in KEYS else model.keys.get("context")
    if given == "auto":
        wanted = model.keys.get("context") or USUAL_LENGTH
        return min(wanted, most) if isinstance(most, int) else wanted
    if isinstance(most, int) and given > most:
        remedy = "longer texts are cut"
        raise InputError("data.max_length", seen=str(given), expected=f"at most {most}, which the model takes",
                         remedy=remedy)  # fmt: skip
    return given
