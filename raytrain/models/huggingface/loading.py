"""Load a module from a transformers folder, check that its weights fit, and export it again."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raytrain.checkpoint.snapshot import split_tied
from raytrain.errors import InputError, first_line
from raytrain.models.sizes import SizeError
from raytrain.models.weights.headers import find_weights
from raytrain.models.weights.initial import misfit, misfits

if TYPE_CHECKING:
    from transformers import PreTrainedModel


HALF = {"BF16": torch.bfloat16, "F16": torch.float16}


class ReadsWeights(RuntimeError):
    """The headers do not suffice: the weights must be read to find out whether they fit."""


@contextlib.contextmanager
def quiet() -> Iterator[Any]:
    """Yield transformers with progress bars and load reports turned off; problems raise errors instead."""
    import transformers
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield transformers
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def open_config(path: str) -> Any:
    """Return the config of a folder. Raises InputError for a model that this version of transformers does not know."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "a model that this version of transformers knows"
        raise InputError("model.path", got=f"{path}: {first_line(error)}", expected=expected) from error


def load_module(auto: Any, config: Any, path: str, *, init: str, head: bool) -> PreTrainedModel:
    """Load a module in float32 without a key-value cache; on the meta device, from config and headers alone.

    Args:
        auto: the transformers class for the task.
        head: tensors outside the model's trunk may be missing or of another size; they are initialised randomly.
    """
    if init not in ("weights", "random"):
        raise SizeError("init", got=repr(init), expected="weights or random")
    on_meta = torch.get_default_device().type == "meta"
    try:
        if init == "random" or on_meta:
            module = auto.from_config(config, dtype=torch.float32)
            found: Mapping[str, list[str]] = {}
            if init == "weights" and misfits_of(module, find_weights(path, key="model.path").shapes, head=head):
                raise ReadsWeights(path)
        else:
            module, report = auto.from_pretrained(
                path, config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True,
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
            found = _within_trunk(module, _reported(report), head=head)
    except (OSError, ValueError) as error:
        if isinstance(error, SizeError):
            raise
        expected = f"a model and weights for {auto.__name__}"
        raise InputError("model.path", got=f"{path}: {first_line(error)}", expected=expected) from error
    if found:
        raise misfit(found, path, key="model.path")
    module.config.use_cache = False  # a key-value cache is for generation only, and hides that rows are packed
    return module


def misfits_of(module: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], *, head: bool) -> dict[str, list[str]]:
    """Return what a folder's headers lack for this module; additional tensors, such as another head, are ignored."""
    return _within_trunk(module, misfits(module, shapes), head=head)


def _reported(report: Mapping[str, Any]) -> dict[str, list[str]]:
    """Convert the load report of transformers to our format."""
    misshapen = [f"{name} {list(seen)} for {list(own)}" for name, seen, own in report["mismatched_keys"]]
    return {"missing": sorted(report["missing_keys"]), "misshapen": sorted(misshapen)}


def _within_trunk(module: PreTrainedModel, found: Mapping[str, list[str]], *, head: bool) -> dict[str, list[str]]:
    prefix = f"{module.base_model_prefix}." if head else ""
    kinds = ("missing", "misshapen")
    kept = {kind: [name for name in found.get(kind, ()) if name.startswith(prefix)] for kind in kinds}
    return {kind: names for kind, names in kept.items() if names}


def exporter(module: PreTrainedModel, path: str | None = None) -> Callable[[dict[str, Tensor], str], None]:
    """Return `Trainable.export` for a module: it writes the config, and the weights under transformers' names.

    The state may be that of a module that wraps this one. `export.misfit(names)` says why a state is neither.

    Args:
        path: the folder that the weights come from: its half-precision tensors are written in its format.
    """
    stored = {} if path is None else find_weights(path, key="model.path").dtypes
    usual = next((dtype for dtype, _ in Counter(stored.values()).most_common(1)), "")
    own = list(module.state_dict())

    def prefix_of(names: Collection[str]) -> str:
        return (
            ""
            if own[0] in names
            else next((name.removesuffix(own[0]) for name in names if name.endswith(f".{own[0]}")), "")
        )

    def misfit(names: Collection[str]) -> dict[str, list[str]]:
        prefix = prefix_of(names)
        wanted = {prefix + name for name in own}
        return {"more": [name for name in names if name not in wanted], "less": sorted(wanted - {*names})}

    def export(state: dict[str, Tensor], folder: str) -> None:
        prefix = prefix_of(state)
        distinct, tied = split_tied({name.removeprefix(prefix): tensor for name, tensor in state.items()})
        halves = {name: HALF.get(stored.get(name, usual)) for name, one in distinct.items() if one.is_floating_point()}
        distinct |= {name: distinct[name].to(half) for name, half in halves.items() if half is not None}
        whole = distinct | {alias: distinct[name] for alias, name in tied.items()}
        with quiet():
            module.config.use_cache = True
            try:
                module.save_pretrained(folder, state_dict=whole, max_shard_size=2**62)
            finally:
                module.config.use_cache = False
        if usual in HALF:
            _say_dtype(os.path.join(folder, "config.json"), str(HALF[usual]).removeprefix("torch."))

    export.misfit = misfit  # pyright: ignore[reportFunctionMemberAccess]  (asked before the first step)
    return export


def _say_dtype(path: str, dtype: str) -> None:
    """Write the weights' dtype into a config, which has that of the module in training; transformers loads in it."""
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    for part in (config, *config.values()):
        if isinstance(part, dict) and "dtype" in part:
            part["dtype"] = dtype
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(config, indent=2, sort_keys=True) + "\n")


def translator(module: PreTrainedModel) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return `Trainable.translate` for a module: transformers renames and merges some tensors when loading."""

    def translate(state: dict[str, Tensor]) -> dict[str, Tensor]:
        with quiet(), torch.random.fork_rng(devices=[]):
            kind: Any = type(module)  # the type stub lacks the load report
            made, report = kind.from_pretrained(
                None, config=copy.deepcopy(module.config), state_dict=dict(state), dtype=torch.float32,
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
        left = set(report["missing_keys"]) | {name for name, *_ in report["mismatched_keys"]}
        found = {name: tensor for name, tensor in made.state_dict().items() if name not in left}
        wrong = {name: torch.empty(seen, device="meta") for name, seen, _ in report["mismatched_keys"]}
        return found | wrong | {name: state[name] for name in report["unexpected_keys"]}

    return translate
