"""Builders for Hugging Face models in a local folder: loads, checks and exports them; nothing is downloaded.

transformers is an optional extra and is imported here only, inside functions.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.checkpoint.snapshot import split_tied
from raytrain.errors import InputError, RunError, first_line
from raytrain.models.gpt import token_loss
from raytrain.models.huggingface import (
    CAUSAL_LM,
    CLASSIFIER,
    check_installed,
    check_patterns,
    has_tokenizer,
    is_frozen,
    longest_input,
    open_tokenizer,
    pad_id,
    read_config,
)
from raytrain.models.sizes import SizeError, check_counts, language_flops
from raytrain.models.weights.headers import find_weights
from raytrain.models.weights.stored import misfit, misfits
from raytrain.trainable import (
    IGNORED_LABEL,
    Batch,
    LossOutput,
    Trainable,
    accuracy,
    in_eval,
    need_keys,
    parameters_of,
    shifted_labels_weight,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["causal_lm", "classifier"]


# ---------------------------------------------------------------- loading
# Load a module from a transformers folder, check that its weights fit, and export it again.


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


def load_module(auto: Any, config: Any, path: str, *, init: str, head: bool) -> PreTrainedModel:
    """Load a module in float32 without a key-value cache; on the meta device, from config and headers alone. `auto`:
    the transformers class for the task. `head`: tensors outside the model's trunk may be missing or of another size;
    they are initialised randomly."""
    if init not in ("weights", "random"):
        raise SizeError("init", got=repr(init), expected="weights or random")
    on_meta = torch.get_default_device().type == "meta"
    try:
        if init == "random" or on_meta:
            module = auto.from_config(config, dtype=torch.float32)
            found: Mapping[str, list[str]] = {}
            if init == "weights" and _within_trunk(
                module, misfits(module, find_weights(path, key="model.path").shapes), head=head
            ):
                raise ReadsWeights(path)
        else:
            module, report = auto.from_pretrained(
                path, config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True,
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
            misshapen = [f"{name} {list(seen)} for {list(own)}" for name, seen, own in report["mismatched_keys"]]
            found = _within_trunk(
                module, {"missing": sorted(report["missing_keys"]), "misshapen": sorted(misshapen)}, head=head
            )
    except (OSError, ValueError) as error:
        if isinstance(error, SizeError):
            raise
        expected = f"a model and weights for {auto.__name__}"
        raise InputError("model.path", got=f"{path}: {first_line(error)}", expected=expected) from error
    if found:
        raise misfit(found, path, key="model.path")
    module.config.use_cache = False  # a key-value cache is for generation only, and hides that rows are packed
    return module


def _within_trunk(module: PreTrainedModel, found: Mapping[str, list[str]], *, head: bool) -> dict[str, list[str]]:
    prefix = f"{module.base_model_prefix}." if head else ""
    kinds = ("missing", "misshapen")
    kept = {kind: [name for name in found.get(kind, ()) if name.startswith(prefix)] for kind in kinds}
    return {kind: names for kind, names in kept.items() if names}


def exporter(module: PreTrainedModel, path: str | None = None) -> Callable[[dict[str, Tensor], str], None]:
    """Return `Trainable.export` for a module: it writes the config, and the weights under transformers' names.

    The state may be that of a module that wraps this one. `export.misfit(names)` says why a state is neither.
    `path`: the folder that the weights come from: its half-precision tensors are written in its format."""
    stored = {} if path is None else find_weights(path, key="model.path").dtypes
    usual = next((dtype for dtype, _ in Counter(stored.values()).most_common(1)), "")
    own = list(module.state_dict())

    def prefix_of(names: Collection[str]) -> str:
        if own[0] in names:
            return ""
        return next((name.removesuffix(own[0]) for name in names if name.endswith(f".{own[0]}")), "")

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
        if usual not in HALF:
            return
        with open(os.path.join(folder, "config.json"), "r+", encoding="utf-8") as file:
            config = json.load(file)  # it has the dtype of the module in training; transformers loads in it
            for part in (config, *config.values()):
                if isinstance(part, dict) and "dtype" in part:
                    part["dtype"] = str(HALF[usual]).removeprefix("torch.")
            file.seek(0)
            file.truncate()
            file.write(json.dumps(config, indent=2, sort_keys=True) + "\n")

    export.misfit = misfit  # pyright: ignore[reportFunctionMemberAccess]  (asked before the first step)
    return export


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


# ---------------------------------------------------------------- transformers


NEAR = 1e-5
PROBE_IDS = ([0, 1, 2, 3], [3, 2, 2, 3])


def causal_lm(
    *,
    path: str,
    context: int | None = None,
    init: str = "weights",
    freeze: str | Sequence[str] = (),
    vocab_size: int | None = None,
) -> Trainable:
    """A language model on batches {"input_ids", "labels"} (B, S), and "attention_mask" or "position_ids" where rows
    are padded or packed. The model shifts labels itself: labels equal the input_ids, with -100 for ignored tokens.

    Args:
        path: a folder that `save_pretrained` wrote.
        context: tokens per window of text; None if rows have their own lengths.
        init: "weights" loads those of the folder, "random" uses its config alone.
        freeze: name patterns of parameters that are not trained.
        vocab_size: vocabulary of the data, filled in by the source.

    Raises:
        InputError: transformers is not installed, there is no such folder, or its weights do not fit.
        SizeError: an invalid value.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config
        >>> from raytrain.models.transformers import causal_lm
        >>> GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=256, n_positions=32).save_pretrained("tiny-gpt2")
        >>> trainable = causal_lm(path="tiny-gpt2", init="random", context=8, freeze=["transformer.wte.*"])
        >>> ids = torch.tensor([list(b"the mill")])
        >>> batch = {"input_ids": ids, "labels": ids}
        >>> 5 < trainable.loss(trainable.module, batch).loss.item() < 6  # about log(256) before the first step
        True
        >>> trainable.module.get_parameter("transformer.wte.weight").requires_grad
        False
    """
    check_installed(CAUSAL_LM)
    most = longest_input(read_config(path))
    if context is not None:
        check_counts(context=context)
        if most is not None and context > most:
            raise SizeError("context", got=str(context), expected=f"at most {most}, the limit of the model in {path}")
    with quiet() as transformers:
        config = _config(path, vocab_size=vocab_size)
        module = load_module(transformers.AutoModelForCausalLM, config, path, init=init, head=False)
        apart = bool(next(module.parameters()).is_meta) or keeps_documents_apart(module)
    _freeze(module, freeze)
    return _trainable(
        module,
        _language_loss(module, apart=apart),
        path if init == "weights" else None,
        weight=shifted_labels_weight,
        flops_per_sample=None if context is None else _flops(module, context),
    )


def classifier(
    *,
    path: str,
    num_labels: int | None = None,
    init: str = "weights",
    freeze: str | Sequence[str] = (),
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    vocab_size: int | None = None,
) -> Trainable:
    """A classifier of texts on batches {"input_ids", "attention_mask"} (B, S) and "labels" (B,).

    The head is initialised randomly if the folder has none of this size.

    Args:
        path, init, freeze: as for `causal_lm`.
        num_labels: number of classes; None = those of the data.
        num_classes, class_names, vocab_size: facts of the data, filled in by the source.

    Raises:
        InputError, SizeError: as for `causal_lm`, and fewer classes than in the data.

    Example:
        >>> import torch
        >>> from transformers import BertConfig
        >>> from raytrain.models.transformers import classifier
        >>> sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
        >>> BertConfig(**sizes, vocab_size=256).save_pretrained("tiny-bert")
        >>> trainable = classifier(path="tiny-bert", init="random", num_labels=2, class_names=["no", "yes"])
        >>> trainable.module.config.id2label
        {0: 'no', 1: 'yes'}
        >>> ids = torch.tensor([list(b"the mill"), list(b"the rain")])
        >>> batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}
        >>> trainable.loss(trainable.module, batch).loss.shape
        torch.Size([])
    """
    check_installed(CLASSIFIER)
    read_config(path)
    if num_labels is None and num_classes is None:
        raise SizeError("num_labels", got="null", expected="a number of classes, as this source does not provide it")
    number = num_labels if num_labels is not None else num_classes
    check_counts(num_labels=number)
    assert number is not None
    if num_classes is not None and number < num_classes:
        raise SizeError("num_labels", got=str(number), expected=f"at least {num_classes}, the classes of the data")
    with quiet() as transformers:
        config = _config(path, vocab_size=vocab_size)
        config.num_labels = number
        config.problem_type = "single_label_classification"
        if class_names is not None and len(class_names) == number:
            config.id2label = dict(enumerate(class_names))
            config.label2id = {name: index for index, name in enumerate(class_names)}
        config.pad_token_id = (
            pad_id(open_tokenizer(path, key="model.path")) if has_tokenizer(path) else config.pad_token_id
        )
        auto = transformers.AutoModelForSequenceClassification
        module = load_module(auto, config, path, init=init, head=True)
    _freeze(module, freeze)
    return _trainable(module, _class_loss, path if init == "weights" else None)


def _trainable(
    module: PreTrainedModel, loss: Callable[..., LossOutput], path: str | None, **more: Any
) -> Trainable:  # fmt: skip
    return Trainable(module, loss, export=exporter(module, path), translate=translator(module), **more)


def _config(path: str, *, vocab_size: int | None) -> Any:
    """Return the folder's config after checking that its vocabulary covers that of the data."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "a model that this version of transformers knows"
        raise InputError("model.path", got=f"{path}: {first_line(error)}", expected=expected) from error
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and rows is not None and vocab_size > rows:
        seen = f"{vocab_size:,} tokens in the data"
        expected = f"at most {rows:,}, the vocabulary of the model in {path}"
        raise InputError("data.tokenizer", got=seen, expected=expected, remedy="auto uses the model's own tokenizer")
    return config


def _freeze(module: nn.Module, patterns: str | Sequence[str]) -> None:
    for pattern in check_patterns(patterns):
        names = [name for name, _ in module.named_parameters() if is_frozen(name, [pattern])]
        if not names:
            some = ", ".join(name for name, _ in list(module.named_parameters())[:3])
            raise InputError(
                "model.freeze", got=f"{pattern}, which no parameter matches", expected=f"names such as {some}"
            )
        for name in names:
            module.get_parameter(name).requires_grad_(False)


# ---------------------------------------------------------------- loss


def _language_loss(module: PreTrainedModel, *, apart: bool) -> Callable[..., LossOutput]:
    name, share = type(module).__name__, getattr(module.config, "router_aux_loss_coef", None)

    def loss(module: nn.Module, batch: Batch) -> LossOutput:
        need_keys(batch, "input_ids", "labels")
        if "position_ids" in batch and not apart:
            raise RunError(
                f"data.packing: packed, but in {name} the documents of a row would attend to each other; use padded"
            )
        out = module(**{key: value for key, value in batch.items() if key != "labels"})
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
        aux = getattr(out, "aux_loss", None)
        return LossOutput(
            token_loss(out.logits, labels),
            aux=None if aux is None or share is None else share * aux,
            metrics={} if module.training else {"accuracy": accuracy(out.logits, labels)},
        )

    return loss


def _class_loss(module: nn.Module, batch: Batch) -> LossOutput:
    need_keys(batch, "input_ids", "labels")
    out = module(**{key: value for key, value in batch.items() if key != "labels"})
    metrics = {} if module.training else {"accuracy": accuracy(out.logits, batch["labels"])}
    return LossOutput(token_loss(out.logits[:, None], batch["labels"][:, None]), metrics=metrics)


@torch.no_grad()
def keeps_documents_apart(module: nn.Module) -> bool:
    """Whether packed documents do not influence each other, tested on two rows of two documents of two tokens.

    The rows differ only in their first document; the logits of the second must agree. The test runs in eval mode,
    because dropout differs between rows."""
    device = next(module.parameters()).device
    rows = torch.tensor(PROBE_IDS, device=device)
    try:
        with in_eval(module):
            logits = module(input_ids=rows, position_ids=torch.tensor([[0, 1, 0, 1]] * 2, device=device)).logits
    except (TypeError, ValueError):  # a forward without position_ids
        return False
    one, other = logits[:, 2:]
    return bool((one - other).abs().max() <= NEAR * logits.abs().max())


def _flops(module: PreTrainedModel, context: int) -> float | None:
    """FLOPs of a full window, or None if the config lacks depth or width; an untied embedding is only looked up."""
    config = module.config.get_text_config()
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if layers is None or width is None:
        return None
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    looked_up = 0 if tied else sum(parameter.numel() for parameter in embedding.parameters())
    matmuls = parameters_of(module) - looked_up
    return language_flops(matmul_parameters=matmuls, layers=layers, width=width, context=context)
