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
        pairs = [(mine.pop(name), theirs.pop(name)) for name in self.objects]
        return all(_same_object(*pair) for pair in pairs) and mine == theirs and self.keys == other.keys

    __hash__ = None  # type: ignore[assignment]


def _same_object(left: Any, right: Any) -> bool:
    return left is right or (isinstance(left, str) and isinstance(right, str) and left == right)


class ModelConfig(OpenSection):
    """The model: a builder ``module:function`` with its keys, or an ``nn.Module`` from Python."""

    objects: ClassVar[tuple[str, ...]] = ("module",)
    builder: Builder | None = Field(
        default=None, examples=["raytrain.models.gpt:gpt"], description="module:function that returns the model"
    )
    module: Annotated[Any, AfterValidator(_python_object)] = Field(
        default=None, repr=False, description="an nn.Module, from Python only"
    )
    init_from: Text | None = Field(
        default=None,
        examples=["runs/latest"],
        description="weights to start from: a run folder, a transformers folder or a safetensors file",
    )

    @property
    def origin(self) -> str:
        """The key that the model comes from, for messages."""
        return "model.builder" if self.module is None else "model.module"


class DataConfig(OpenSection):
    """The data: a source with its keys, or datasets from Python."""

    objects: ClassVar[tuple[str, ...]] = ("train", "eval")
    source: Source | None = Field(
        default=None, examples=["text"], description="a built-in source, or your own module:function"
    )
    storage: Literal["auto", "resident", "pinned", "stream"] = Field(
        default="auto",
        description="resident: the full split on the device, read once; pinned, stream: rows read in every epoch",
    )
    loader_workers: NonNegativeInt | Auto = Field(
        default="auto", description="processes that read a streamed dataset; 0: the training process itself"
    )
    prefetch: Count = Field(default=2, description="batches that each loader process reads ahead")
    tokens_per_batch: Count | None = Field(
        default=None,
        examples=[4096],
        description="most tokens of a micro-batch, padding included; null: count rows instead",
    )
    collate: OwnFunction = Field(
        default=None, description="your own function from a list of rows to a batch; null: stack, pad and mask"
    )
    eval_fraction: Share = Field(default=0.1, description="fraction of the data kept for evaluation")
    drop_last: bool = Field(
        default=False, description="leave out the rows at the end of an epoch that do not fill a global batch"
    )
    train: Annotated[Any, AfterValidator(_python_object)] = Field(
        default=None, repr=False, description="a dataset, from Python only"
    )
    eval: Annotated[Any, AfterValidator(_python_object)] = Field(
        default=None, repr=False, description="a dataset, from Python only"
    )


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw", "sgd", "muon"] = Field(
        default="adamw", description="the optimizer; muon: for the matrices of blocks, with AdamW for the rest"
    )
    lr: Positive = Field(default=1e-3, description="peak learning rate")
    weight_decay: NonNegative = Field(default=0.1, description="weight decay of matrices; vectors have none")
    betas: Betas = Field(default=(0.9, 0.99), description="AdamW's two decay rates")
    momentum: Share = Field(default=0.9, description="momentum of SGD and Muon")
    eps: Positive = Field(default=1e-8, description="AdamW's epsilon in the denominator")
    fused: bool | Auto = Field(default="auto", description="fused optimizer kernels; auto: where torch has them")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="the learning rate after the warm-up"
    )
    warmup_steps: NonNegativeInt | Auto = Field(
        default="auto", description="warm-up steps; auto: 100 or 5 % of the run, the smaller"
    )
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="the last learning rate, as a fraction of lr"
    )
    max_grad_norm: NonNegative | None = Field(default=1.0, description="clip gradients by global norm; 0 or null: off")
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="how lr scales with the global batch size"
    )


class PrecisionConfig(Section):
    """The number format of the forward and backward passes."""

    dtype: Literal["auto", "fp64", "fp32", "tf32", "bf16", "fp16"] = Field(
        default="auto", description="the number format; auto: by device capability and a measured comparison"
    )
    fallback: bool = Field(default=True, description="continue in a wider format if this one fails")
    fp32_layers: list[Text] | Auto = Field(
        default=[],
        examples=[["lm_head"]],
        description="modules that stay in fp32 under bf16 or fp16; auto: those that need it, measured",
    )


class LoopConfig(Section):
    """The training loop: length, batches, evaluation, logging and compilation."""

    max_steps: Count | None = Field(
        default=None, examples=[500], description="optimizer steps; with epochs, whichever is reached first"
    )
    epochs: Count | None = Field(
        default=None, examples=[3], description="passes over the data; 1 if max_steps is not given either"
    )
    global_batch_size: Count | Auto = Field(default=32, description="samples per optimizer step, over all workers")
    micro_batch_size: Count | Literal["auto", "whole"] = Field(
        default="auto",
        description="samples per forward pass of one worker; whole: all of a global batch, never split, on one worker",
    )
    eval_every: Count | Auto = Field(
        default="auto", description="steps between evaluations; there is always one at the end"
    )
    eval_batches: Count | None = Field(
        default=None, examples=[20], description="global batches of one evaluation; null: all"
    )
    eval_clear_every: Count | None = Field(
        default=None, examples=[50], description="evaluation batches after which cached memory is released; null: never"
    )
    clear_every: Count | None = Field(
        default=None,
        examples=[100],
        description="training steps after which cached memory is released; null: never, which is faster",
    )
    grow_after: Count | None = Field(
        default=100, description="steps without out-of-memory until a halved micro-batch is tried larger; null: never"
    )
    log_every: NonNegativeInt | Literal["epoch"] = Field(
        default=10,
        description="steps between train rows, or `epoch`: one, and a line on the terminal, at the end of each epoch; "
        "the first and the last step always have one",
    )
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune"] = Field(
        default="auto",
        description="torch.compile mode; auto: default where it measures faster, in runs long enough to pay for it; on "
        "GPUs reduce-overhead compiles the full model only, as CUDA graphs need",
    )
    compile_parts: Literal["auto", "all", "blocks"] | list[Text] = Field(
        default="auto",
        description="what is compiled: names of modules, or ends of names; auto: all on a GPU, else blocks, if any",
    )
    activation_checkpointing: bool | Count = Field(
        default=False, description="recompute activations to save memory: true for each block, N for every Nth"
    )
    cudnn_benchmark: bool | Auto = Field(
        default="auto",
        description="cuDNN searches for the fastest kernel of each shape; auto: on a GPU, while shapes are few",
    )
    mask_cache_mb: NonNegative = Field(default=8.0, description="MiB of attention masks kept; 0: none")
    reference: bool = Field(default=False, description="the reference path: every optimization is switched off")
    deterministic: bool = Field(default=False, description="use deterministic kernels, on a GPU too")
    patience: Count | None = Field(
        default=None, examples=[5], description="evaluations without improvement until an early stop"
    )
    min_delta: NonNegative = Field(
        default=0.0, description="the smallest decrease of the eval loss that counts as an improvement"
    )


class SaveConfig(Section):
    """Where a run is written, and how often its state is saved."""

    every: Count | Auto = Field(
        default="auto",
        description="steps between checkpoints; auto: 30 s of work, more where saving takes over 3 % of the time",
    )
    keep: Count | Literal["all"] = Field(default=3, description="number of latest checkpoints kept, besides the best")
    dir: Text = Field(default="runs", description="folder or URI in which run folders are created")
    asynchronous: bool = Field(default=True, description="write in the background while training continues")
    export: Literal["auto", "best", "last"] = Field(
        default="auto",
        description="weights of a finished run: of the best evaluation or the last step; auto: best with patience",
    )


class ScaleConfig(Section):
    """The workers: how many, on which devices, and how the model is distributed over them."""

    workers: Count | Auto | WorkerRange = Field(default="auto", description="a number, or [min, max] for elastic")
    mode: Literal["auto", "cpu", "single_gpu", "multi_gpu"] = Field(default="auto", description="kind of devices")
    strategy: Literal["auto", "data_parallel", "fsdp", "expert_parallel"] = Field(
        default="auto", description="how the model is distributed over the workers"
    )
    accelerator: Text | None = Field(
        default=None, examples=["cuda:0"], description="cpu, cuda, cuda:0, or a type such as H100"
    )
    gpus_per_worker: GpuShare = Field(
        default=1.0,
        examples=[0.5],
        description="part of a GPU that each worker and each expert host gets; below 1, to develop with few GPUs, they "
        "communicate through the host",
    )
    threads: Count | Auto = Field(default="auto", description="CPU threads of each worker")
    shares: Literal["auto", "equal"] = Field(
        default="equal", description="micro-batches per worker; auto: by measured speed"
    )
    sync_batchnorm: bool = Field(
        default=False, description="batch norms use the statistics of all workers' micro-batches, not of each worker's"
    )
    overlap: bool | Auto = Field(default="auto", description="reduce gradients while the last backward still runs")


class RetryConfig(Section):
    """When a run gives up, and how long it waits."""

    restarts_without_progress: NonNegativeInt = Field(
        default=3, description="attempts in a row without a new step until the run fails; 0: at the first"
    )
    nonfinite_steps: Count = Field(default=3, description="non-finite steps in a row until a roll-back")
    rollbacks: NonNegativeInt = Field(default=3, description="roll-backs until the run fails")
    stop_grace_s: NonNegative = Field(default=60.0, description="seconds to save a checkpoint after a stop signal")
    host_wait_s: NonNegative = Field(default=30.0, description="seconds to wait for a new expert host")
    host_silence_s: Positive = Field(
        default=60.0,
        description="seconds without a response until an expert host or a worker is replaced",
    )
    hang_s: Positive | None = Field(
        default=300.0,
        description="seconds without progress until the workers restart, although they respond; null: never",
    )


class TuneConfig(Section):
    """The search over batch size and precision, or over whichever keys `space` names."""

    space: dict[str, Any] | None = Field(
        default=None,
        examples=[{"optim.lr": [0.0003, 0.001]}],
        description="key -> values to try; null: batch and precision",
    )
    metric: Literal["eval_loss", "samples_per_s"] = Field(
        default="eval_loss", description="what ranks trials of tune.space: lowest eval_loss or highest samples_per_s"
    )
    scheduler: Literal["none", "asha", "median"] = Field(
        default="none", description="stops trials of tune.space early if their evaluations fall behind"
    )
    searcher: Literal["random", "optuna"] = Field(
        default="random",
        description="random: all combinations of tune.space, or random draws; optuna: chosen by the results so far",
    )
    max_trials: Count | None = Field(default=None, examples=[20], description="most trials of a search")


class InferConfig(Section):
    """Batch inference over the rows of files."""

    input: Text | Texts | None = Field(
        default=None, examples=["rows.parquet"], description="files or folders of rows; a path, URI or list"
    )
    output: Text | None = Field(
        default=None, examples=["answers"], description="a new folder; null: predictions/NAME-TIME in the run"
    )
    weights: Literal["auto", "best", "last"] | Count = Field(
        default="auto", description="of a run: best, last, or the step of a checkpoint; auto: what the run exports"
    )
    batch_size: Count | Auto = Field(default="auto", description="rows per forward pass")
    unit_rows: Count | Auto = Field(default="auto", description="rows that a worker computes and writes at a time")
    stages: Count | Auto = Field(
        default="auto", description="devices that hold a part of the model each; auto: one if it fits, else the fewest"
    )
    stage_policy: Literal["auto", "balanced", "balanced_low_0", "sequential"] = Field(
        default="auto",
        description="how the model's parts are divided over stages; auto is balanced, balanced_low_0 leaves the first "
        "one little, sequential fills one after another",
    )
    stage_map: Texts = Field(
        default=(),
        examples=[["tokens, 0-10", "11-20, norm, head"]],
        description="the parts of each stage, such as ['tokens, 0-10', '11-20, norm, head']; [] divides them",
    )
    inflight: Count | Auto = Field(default="auto", description="batches at the same time in a model over stages")
    quantize: Literal["int8"] | None = Field(
        default=None,
        examples=["int8"],
        description="int8 holds the weights of linear layers in a quarter of the memory; on a GPU slower than bf16",
    )
    max_samples: Count | None = Field(
        default=None, examples=[100], description="read only so many rows, the first of the input"
    )
    max_failures: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.01, description="the share of rows that may fail before the command fails"
    )
    id_column: Text | None = Field(
        default=None, examples=["id"], description="a column of unique ids; null: the row's number, from 0"
    )
    keep: Texts = Field(default=(), examples=[["id"]], description="input columns to write beside the predictions")
    label: Text | None = Field(
        default=None, examples=["label"], description="a column with the right answers: writes quality figures"
    )
    format: Literal["parquet", "csv", "jsonl"] = Field(default="parquet", description="format of the predictions")
    prompt_field: Text | None = Field(
        default=None, examples=["question"], description="the column of prompts; null: prompt, text, ..."
    )
    template: Text | None = Field(
        default=None,
        examples=["Question: {question}"],
        description="a prompt with {column}, or the name of one of templates",
    )
    templates: dict[str, str] = Field(
        default={}, examples=[{"short": "Q: {question}"}], description="prompts by name, each with {column}"
    )
    chat: bool = Field(default=False, description="put prompts into the tokenizer's chat template")
    max_new_tokens: Count = Field(default=128, description="most tokens of an answer")
    temperature: NonNegative = Field(default=0.0, description="0: the most likely token; above: draws, seeded per row")
    top_k: Count | None = Field(default=None, examples=[40], description="draw from the k most likely tokens")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, examples=[0.9], description="draw from the most likely tokens of this total probability"
    )
    stop: Texts = Field(default=(), examples=[["END"]], description="texts that end an answer")
