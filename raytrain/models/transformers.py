"""Builders for models of Hugging Face's transformers in a local folder; an optional extra, nothing is downloaded.

Both compute their loss themselves from the logits: transformers' own casts them to float32, which float64 would not
survive, and knows one mean where a step over several workers has many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from raytrain.errors import InputError, RunError
from raytrain.models.gpt import token_loss
from raytrain.models.huggingface.folder import (
    CAUSAL_LM,
    CLASSIFIER,
    check_installed,
    check_patterns,
    is_frozen,
    longest_input,
    read_config,
)
from raytrain.models.huggingface.loading import exporter, load_module, open_config, quiet, translator
from raytrain.models.huggingface.tokenizer import has_tokenizer, open_tokenizer, pad_id
from raytrain.models.sizes import SizeError, check_counts, language_flops
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
    are padded or packed. It shifts inside: labels are the input_ids, -100 where nothing is to be learned.

    Args:
        path: a folder that `save_pretrained` wrote.
        context: tokens of a window of text; None where rows have lengths of their own.
        init: "weights" of the folder, or "random" from its config alone.
        freeze: patterns of names of parameters that are not trained.
        vocab_size: of the data, filled in by the source.

    Raises:
        InputError: transformers is not installed, no such folder, or weights that do not fit. SizeError: a bad value.
    """
    check_installed(CAUSAL_LM)
    most = longest_input(read_config(path))
    if context is not None:
        check_counts(context=context)
        if most is not None and context > most:
            raise SizeError("context", seen=str(context), expected=f"at most {most}, which the model in {path} takes")
    with quiet() as transformers:
        config = _config(path, vocab_size=vocab_size)
        module = load_module(transformers.AutoModelForCausalLM, config, path, init=init, head=False)
        apart = bool(next(module.parameters()).is_meta) or keeps_documents_apart(module)
    _freeze(module, freeze)
    return _trainable(
        module,
        _language_loss(module, apart=apart),
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

    The head is drawn anew where the folder has none of this size.

    Args:
        path, init, freeze: as for `causal_lm`.
        num_labels: number of classes; None = what the data has.
        num_classes, class_names, vocab_size: of the data, filled in by the source.

    Raises:
        InputError, SizeError: as for `causal_lm`; fewer classes than the data has.
    """
    check_installed(CLASSIFIER)
    read_config(path)
    if num_labels is None and num_classes is None:
        raise SizeError("num_labels", seen="null", expected="a number of classes, as this source does not say it")
    number = num_labels if num_labels is not None else num_classes
    check_counts(num_labels=number)
    assert number is not None
    if num_classes is not None and number < num_classes:
        raise SizeError("num_labels", seen=str(number), expected=f"at least {num_classes}, the classes of the data")
    with quiet() as transformers:
        config = _config(path, vocab_size=vocab_size)
        config.num_labels = number
        config.problem_type = "single_label_classification"
        if class_names is not None and len(class_names) == number:
            config.id2label = dict(enumerate(class_names))
            config.label2id = {name: index for index, name in enumerate(class_names)}
        config.pad_token_id = _pad_id(path, config)
        auto = transformers.AutoModelForSequenceClassification
        module = load_module(auto, config, path, init=init, head=True)
    _freeze(module, freeze)
    return _trainable(module, _class_loss)


def _trainable(module: PreTrainedModel, loss: Callable[..., LossOutput], **more: Any) -> Trainable:
    return Trainable(module, loss, export=exporter(module), translate=translator(module), **more)


def _config(path: str, *, vocab_size: int | None) -> Any:
    """The folder's config, once its embedding is found to have a row for each token of the data."""
    config = open_config(path)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and rows is not None and vocab_size > rows:
        seen = f"{vocab_size:,} tokens in the data"
        expected = f"at most {rows:,}, which the model in {path} knows"
        raise InputError("data.tokenizer", seen=seen, expected=expected, remedy="auto takes the model's own")
    return config


def _pad_id(path: str, config: Any) -> int | None:
    """The id that rows are padded with: models that read a row's last token find it by that."""
    return pad_id(open_tokenizer(path, key="model.path")) if has_tokenizer(path) else config.pad_token_id


def _freeze(module: nn.Module, patterns: str | Sequence[str]) -> None:
    for pattern in check_patterns(patterns):
        names = [name for name, _ in module.named_parameters() if is_frozen(name, [pattern])]
        if not names:
            some = ", ".join(name for name, _ in list(module.named_parameters())[:3])
            raise InputError(
                "model.freeze", seen=f"{pattern}, which no parameter matches", expected=f"names such as {some}"
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
                f"data.packing: packed, but in {name} the documents of a row would read each other; take padded"
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
    """Whether what stands before a position 0 in a row changes nothing after it: two rows of two documents of two
    tokens, which differ in the first document only, must have the same logits in the second. In eval mode: what is
    dropped in training differs from row to row."""
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
    """Of a full window, where the config says depth and width; an embedding that is no head is looked up only."""
    config = module.config.get_text_config()
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if layers is None or width is None:
        return None
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    looked_up = 0 if tied else sum(parameter.numel() for parameter in embedding.parameters())
    matmuls = parameters_of(module) - looked_up
    return language_flops(matmul_parameters=matmuls, layers=layers, width=width, context=context)
