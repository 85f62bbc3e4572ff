"""The sections of a job that training reads. Values are checked here, by the section that owns them.

Checks that need two sections are in `jobs.job.spec`; `raytrain.plan.plan` resolves `auto` values.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from cluster.config import Count, NonNegative, NonNegativeInt, Positive, Section, Share, Text

PLACEHOLDER = "<object "
"""Prefix of a Python object in an encoded job: ``<object MyNet>`` replaces a value that JSON cannot hold."""


def _list_as_tuple(value: Any) -> Any:
    """YAML has lists only; a strict tuple would refuse them."""
    return tuple(value) if isinstance(value, list) else value


def _ordered(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] > value[1]:
        raise ValueError("min is greater than max")
    return value


def _divides_a_gpu(value: float) -> float:
    if 1 / value - int(1 / value + 1e-9) > 0.05:  # 0.33 is a third; what 0.4 leaves of a GPU nobody could use
        raise ValueError("not a GPU divided by a whole number")
    return value


def _python_object(value: Any) -> Any:
    """Objects come from Python; a plain YAML scalar here is a mistake, a placeholder of `encode` is not."""
    is_scalar = isinstance(value, (bool, int, float, str))
    if is_scalar and not (isinstance(value, str) and value.startswith(PLACEHOLDER)):
        raise ValueError("a scalar is not a Python object")
    return value


def _own_function(value: Any) -> Any:
    """A function of the user's: its name, or the function itself from Python."""
    is_named = isinstance(value, str) and (value.startswith(PLACEHOLDER) or re.fullmatch(_FUNCTION, value))
    if value is not None and not is_named and not callable(value):
        raise ValueError("neither module:function nor a function")
    return value


Texts = Annotated[tuple[Text, ...], BeforeValidator(_list_as_tuple)]
Betas = Annotated[tuple[Share, Share], BeforeValidator(_list_as_tuple)]
WorkerRange = Annotated[
    tuple[Count, Count],
    BeforeValidator(_list_as_tuple),
    AfterValidator(_ordered),
    Field(json_schema_extra={"expected": "[min, max] with 1 <= min <= max"}),
]
GpuShare = Annotated[
    float,
    Field(gt=0, le=1, json_schema_extra={"expected": "1, or 1 divided by a whole number, such as 0.5"}),
    AfterValidator(_divides_a_gpu),
]
Auto = Literal["auto"]
_PATH = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_FUNCTION = rf"^{_PATH}:[A-Za-z_]\w*$"
Builder = Annotated[str, Field(pattern=_FUNCTION, json_schema_extra={"expected": "module:function"})]
OwnFunction = Annotated[
    Any,
    AfterValidator(_own_function),
    Field(json_schema_extra={"expected": "module:function, or a function from Python"}),
]
Source = Annotated[
    str,
    Field(
        pattern=rf"^{_PATH}(?::[A-Za-z_]\w*)?$",
        json_schema_extra={"expected": "the name of a source or module:function"},
    ),
]


def key(default: Any, meaning: str, *examples: Any, **more: Any) -> Any:
    """A key of a section: its default, what it means, and what a user may type for it."""
    return Field(default=default, description=meaning, examples=list(examples) or None, **more)


class OpenSection(Section):
    """A section whose additional keys are passed to a user's function, and whose values may be Python objects."""

    model_config = ConfigDict(extra="allow")
    objects: ClassVar[tuple[str, ...]] = ()

    @property
    def keys(self) -> dict[str, Any]:
        """The additional keys, as given: keyword arguments for the builder or the source."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def given(self) -> tuple[str, ...]:
        """raytrain's own keys of the section that the job sets, other than the one that names the function."""
        named = set(type(self).model_fields) - {"builder", "source"}
        return tuple(sorted(self.model_fields_set & named))

    def __eq__(self, other: object) -> bool:
        """Compares Python objects by identity, since comparing tensors has no truth value."""
        if type(self) is not type(other) or not isinstance(other, OpenSection):
            return NotImplemented
        mine, theirs = dict(self.__dict__), dict(other.__dict__)
        for name in self.objects:
            left, right = mine.pop(name), theirs.pop(name)
            if left is not right and not (isinstance(left, str) and isinstance(right, str) and left == right):
                return False
        return mine == theirs and self.keys == other.keys

    __hash__ = None  # type: ignore[assignment]


class ModelConfig(OpenSection):
    """The model: a builder ``module:function`` with its keys, or an ``nn.Module`` from Python."""

    objects: ClassVar[tuple[str, ...]] = ("module",)
    builder: Builder | None = key(None, "module:function that returns the model", "raytrain.models.gpt:gpt")
    module: Annotated[Any, AfterValidator(_python_object)] = key(None, "an nn.Module, from Python only", repr=False)
    init_from: Text | None = key(
        None, "weights to start from: a run folder, a transformers folder or a safetensors file", "runs/latest"
    )

    @property
    def origin(self) -> str:
        """The key that the model comes from, for messages."""
        return "model.builder" if self.module is None else "model.module"


class DataConfig(OpenSection):
    """The data: a source with its keys, or datasets from Python."""

    objects: ClassVar[tuple[str, ...]] = ("train", "eval")
    source: Source | None = key(None, "a built-in source, or your own module:function", "text")
    storage: Literal["auto", "resident", "pinned", "stream"] = key(
        "auto", "resident: the full split on the device, read once; pinned, stream: rows read in every epoch"
    )
    loader_workers: NonNegativeInt | Auto = key(
        "auto", "processes that read a streamed dataset; 0: the training process itself"
    )
    prefetch: Count = key(2, "batches that each loader process reads ahead")
    tokens_per_batch: Count | None = key(
        None, "most tokens of a micro-batch, padding included; null: count rows instead", 4096
    )
    collate: OwnFunction = key(None, "your own function from a list of rows to a batch; null: stack, pad and mask")
    eval_fraction: Share = key(0.1, "fraction of the data kept for evaluation")
    drop_last: bool = key(False, "leave out the rows at the end of an epoch that do not fill a global batch")
    train: Annotated[Any, AfterValidator(_python_object)] = key(None, "a dataset, from Python only", repr=False)
    eval: Annotated[Any, AfterValidator(_python_object)] = key(None, "a dataset, from Python only", repr=False)


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "sgd", "muon"] = key(
        "adamw", "the optimizer; muon: for the matrices of blocks, with AdamW for the rest"
    )
    lr: Positive = key(1e-3, "peak learning rate")
    weight_decay: NonNegative = key(0.1, "weight decay of matrices; vectors have none")
    betas: Betas = key((0.9, 0.99), "AdamW's two decay rates")
    momentum: Share = key(0.9, "momentum of SGD and Muon")
    eps: Positive = key(1e-8, "AdamW's epsilon in the denominator")
    fused: bool | Auto = key("auto", "fused optimizer kernels; auto: where torch has them")
    schedule: Literal["cosine", "linear", "constant"] = key("cosine", "the learning rate after the warm-up")
    warmup_steps: NonNegativeInt | Auto = key("auto", "warm-up steps; auto: 100 or 5 % of the run, the smaller")
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = key(0.1, "the last learning rate, as a fraction of lr")
    max_grad_norm: NonNegative | None = key(1.0, "clip gradients by global norm; 0 or null: off")
    scale_lr: Literal["none", "linear", "sqrt"] = key("none", "how lr scales with the global batch size")


class PrecisionConfig(Section):
    """The number format of the forward and backward passes."""

    dtype: Literal["auto", "fp64", "fp32", "tf32", "bf16", "fp16"] = key(
        "auto", "the number format; auto: by device capability and a measured comparison"
    )
    fallback: bool = key(True, "continue in a wider format if this one fails")
    fp32_layers: list[Text] | Auto = key(
        [], "modules that stay in fp32 under bf16 or fp16; auto: those that need it, measured", ["lm_head"]
    )


class LoopConfig(Section):
    """The training loop: length, batches, evaluation, logging and compilation."""

    max_steps: Count | None = key(None, "optimizer steps; with epochs, whichever is reached first", 500)
    epochs: Count | None = key(None, "passes over the data; 1 if max_steps is not given either", 3)
    global_batch_size: Count | Auto = key(32, "samples per optimizer step, over all workers")
    micro_batch_size: Count | Literal["auto", "whole"] = key(
        "auto", "samples per forward pass of one worker; whole: all of a global batch, never split, on one worker"
    )
    eval_every: Count | Auto = key("auto", "steps between evaluations; there is always one at the end")
    eval_batches: Count | None = key(None, "global batches of one evaluation; null: all", 20)
    eval_clear_every: Count | None = key(
        None, "evaluation batches after which cached memory is released; null: never", 50
    )
    clear_every: Count | None = key(
        None, "training steps after which cached memory is released; null: never, which is faster", 100
    )
    grow_after: Count | None = key(
        100, "steps without out-of-memory until a halved micro-batch is tried larger; null: never"
    )
    log_every: NonNegativeInt | Literal["epoch"] = key(
        10,
        "steps between train rows, or `epoch`: one, and a line on the terminal, at the end of each epoch; "
        "the first and the last step always have one",
    )
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune"] = key(
        "auto",
        "torch.compile mode; auto: default where it measures faster, in runs long enough to pay for it; on "
        "GPUs reduce-overhead compiles the full model only, as CUDA graphs need",
    )
    compile_parts: Literal["auto", "all", "blocks"] | list[Text] = key(
        "auto", "what is compiled: names of modules, or ends of names; auto: all on a GPU, else blocks, if any"
    )
    activation_checkpointing: bool | Count = key(
        False, "recompute activations to save memory: true for each block, N for every Nth"
    )
    cudnn_benchmark: bool | Auto = key(
        "auto", "cuDNN searches for the fastest kernel of each shape; auto: on a GPU, while shapes are few"
    )
    mask_cache_mb: NonNegative = key(8.0, "MiB of attention masks kept; 0: none")
    reference: bool = key(False, "the reference path: every optimization is switched off")
    deterministic: bool = key(False, "use deterministic kernels, on a GPU too")
    patience: Count | None = key(None, "evaluations without improvement until an early stop", 5)
    min_delta: NonNegative = key(0.0, "the smallest decrease of the eval loss that counts as an improvement")


class SaveConfig(Section):
    """Where a run is written, and how often its state is saved."""

    every: Count | Auto = key(
        "auto", "steps between checkpoints; auto: 30 s of work, more where saving takes over 3 % of the time"
    )
    keep: Count | Literal["all"] = key(3, "number of latest checkpoints kept, besides the best")
    dir: Text = key("runs", "folder or URI in which run folders are created")
    asynchronous: bool = key(True, "write in the background while training continues")
    export: Literal["auto", "best", "last"] = key(
        "auto", "weights of a finished run: of the best evaluation or the last step; auto: best with patience"
    )


class ScaleConfig(Section):
    """The workers: how many, on which devices, and how the model is distributed over them."""

    workers: Count | Auto | WorkerRange = key("auto", "a number, or [min, max] for elastic")
    mode: Literal["auto", "cpu", "single_gpu", "multi_gpu"] = key("auto", "kind of devices")
    strategy: Literal["auto", "data_parallel", "fsdp", "expert_parallel"] = key(
        "auto", "how the model is distributed over the workers"
    )
    accelerator: Text | None = key(None, "cpu, cuda, cuda:0, or a type such as H100", "cuda:0")
    gpus_per_worker: GpuShare = key(
        1.0,
        "part of a GPU that each worker and each expert host gets; below 1, to develop with few GPUs, they "
        "communicate through the host",
        0.5,
    )
    threads: Count | Auto = key(
        "auto", "CPU threads of each worker; 1 where other programs use the cores, for which threads would wait"
    )
    shares: Literal["auto", "equal"] = key("equal", "micro-batches per worker; auto: by measured speed")
    sync_batchnorm: bool = key(
        False, "batch norms use the statistics of all workers' micro-batches, not of each worker's"
    )
    overlap: bool | Auto = key("auto", "reduce gradients while the last backward still runs")


class RetryConfig(Section):
    """When a run gives up, and how long it waits."""

    restarts_without_progress: NonNegativeInt = key(
        3, "attempts in a row without a new step until the run fails; 0: at the first"
    )
    nonfinite_steps: Count = key(3, "non-finite steps in a row until a roll-back")
    rollbacks: NonNegativeInt = key(3, "roll-backs until the run fails")
    stop_grace_s: NonNegative = key(60.0, "seconds to save a checkpoint after a stop signal")
    host_wait_s: NonNegative = key(30.0, "seconds to wait for a new expert host")
    host_silence_s: Positive = key(60.0, "seconds without a response until an expert host or a worker is replaced")
    hang_s: Positive | None = key(
        300.0, "seconds without progress until the workers restart, although they respond; null: never"
    )


class TuneConfig(Section):
    """The search over batch size and precision, or over whichever keys `space` names."""

    space: dict[str, Any] | None = key(
        None, "key -> values to try; null: batch and precision", {"optim.lr": [0.0003, 0.001]}
    )
    metric: Literal["eval_loss", "samples_per_s"] = key(
        "eval_loss", "what ranks trials of tune.space: lowest eval_loss or highest samples_per_s"
    )
    scheduler: Literal["none", "asha", "median"] = key(
        "none", "stops trials of tune.space early if their evaluations fall behind"
    )
    searcher: Literal["random", "optuna"] = key(
        "random", "random: all combinations of tune.space, or random draws; optuna: chosen by the results so far"
    )
    max_trials: Count | None = key(None, "most trials of a search", 20)


class InferConfig(Section):
    """Batch inference over the rows of files."""

    input: Text | Texts | None = key(None, "files or folders of rows; a path, URI or list", "rows.parquet")
    output: Text | None = key(None, "a new folder; null: predictions/NAME-TIME in the run", "answers")
    weights: Literal["auto", "best", "last"] | Count = key(
        "auto", "of a run: best, last, or the step of a checkpoint; auto: what the run exports"
    )
    batch_size: Count | Auto = key("auto", "rows per forward pass")
    unit_rows: Count | Auto = key("auto", "rows that a worker computes and writes at a time")
    stages: Count | Auto = key(
        "auto", "devices that hold a part of the model each; auto: one if it fits, else the fewest"
    )
    stage_policy: Literal["auto", "balanced", "balanced_low_0", "sequential"] = key(
        "auto",
        "how the model's parts are divided over stages; auto is balanced, balanced_low_0 leaves the first "
        "one little, sequential fills one after another",
    )
    stage_map: Texts = key(
        (),
        "the parts of each stage, such as ['tokens, 0-10', '11-20, norm, head']; [] divides them",
        ["tokens, 0-10", "11-20, norm, head"],
    )
    inflight: Count | Auto = key("auto", "batches at the same time in a model over stages")
    quantize: Literal["int8"] | None = key(
        None, "int8 holds the weights of linear layers in a quarter of the memory; on a GPU slower than bf16", "int8"
    )
    max_samples: Count | None = key(None, "read only so many rows, the first of the input", 100)
    max_failures: Annotated[float, Field(ge=0, le=1)] = key(
        0.01, "the share of rows that may fail before the command fails"
    )
    id_column: Text | None = key(None, "a column of unique ids; null: the row's number, from 0", "id")
    keep: Texts = key((), "input columns to write beside the predictions", ["id"])
    label: Text | None = key(None, "a column with the right answers: writes quality figures", "label")
    format: Literal["parquet", "csv", "jsonl"] = key("parquet", "format of the predictions")
    prompt_field: Text | None = key(None, "the column of prompts; null: prompt, text, ...", "question")
    template: Text | None = key(None, "a prompt with {column}, or the name of one of templates", "Question: {question}")
    templates: dict[str, str] = key({}, "prompts by name, each with {column}", {"short": "Q: {question}"})
    chat: bool = key(False, "put prompts into the tokenizer's chat template")
    max_new_tokens: Count = key(128, "most tokens of an answer")
    temperature: NonNegative = key(0.0, "0: the most likely token; above: draws, seeded per row")
    top_k: Count | None = key(None, "draw from the k most likely tokens", 40)
    top_p: Annotated[float, Field(gt=0, le=1)] | None = key(
        None, "draw from the most likely tokens of this total probability", 0.9
    )
    stop: Texts = key((), "texts that end an answer", ["END"])
