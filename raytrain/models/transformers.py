"""Builders for Hugging Face transformers models in a local folder; an optional extra, nothing is downloaded.

Both compute their loss from the logits: the loss of transformers casts logits to float32, even from float64, and
averages over one batch, while a step over several workers has many.
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

__all__ = ["causal_lm", "classifier"]

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
        config.pad_token_id = _pad_id(path, config)
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
    config = open_config(path)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and rows is not None and vocab_size > rows:
        seen = f"{vocab_size:,} tokens in the data"
        expected = f"at most {rows:,}, the vocabulary of the model in {path}"
        raise InputError("data.tokenizer", got=seen, expected=expected, remedy="auto uses the model's own tokenizer")
    return config


def _pad_id(path: str, config: Any) -> int | None:
    """Return the padding id, by which classifiers find the last token of a row."""
    return pad_id(open_tokenizer(path, key="model.path")) if has_tokenizer(path) else config.pad_token_id


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
