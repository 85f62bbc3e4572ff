"""The sections of a job that training reads. Values are checked here, by the section that owns them.

Checks that need two sections stand in `jobs.job.spec`; what `auto` becomes is decided in `raytrain.plan.plan`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from cluster.config import Count, NonNegative, NonNegativeInt, Positive, Section, Share, Text

PLACEHOLDER = "<object "
"""How a Python object begins in an encoded job: ``<object MyNet>`` stands for something JSON cannot hold."""


def _list_as_tuple(value: Any) -> Any:
    """YAML has lists only; a strict tuple would refuse them."""
    return tuple(value) if isinstance(value, list) else value


def _ordered(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] > value[1]:
        raise ValueError("min is greater than max")
    return value


def _python_object(value: Any) -> Any:
    """Objects come from Python; a plain YAML scalar here is a mistake, a placeholder of `encode` is not."""
    is_scalar = isinstance(value, (bool, int, float, str))
    if is_scalar and not (isinstance(value, str) and value.startswith(PLACEHOLDER)):
        raise ValueError("a scalar is not a Python object")
    return value


Betas = Annotated[tuple[Share, Share], BeforeValidator(_list_as_tuple)]
WorkerRange = Annotated[
    tuple[Count, Count],
    BeforeValidator(_list_as_tuple),
    AfterValidator(_ordered),
    Field(json_schema_extra={"expected": "[min, max] with 1 <= min <= max"}),
]
Auto = Literal["auto"]
_PATH = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
Builder = Annotated[str, Field(pattern=rf"^{_PATH}:[A-Za-z_]\w*$", json_schema_extra={"expected": "module:function"})]
Source = Annotated[
    str,
    Field(
        pattern=rf"^{_PATH}(?::[A-Za-z_]\w*)?$",
        json_schema_extra={"expected": "the name of a source or module:function"},
    ),
]


class OpenSection(Section):
    """A section whose other keys go to somebody's function, and whose values may be live Python objects."""

    model_config = ConfigDict(extra="allow")
    objects: ClassVar[tuple[str, ...]] = ()

    @property
    def keys(self) -> dict[str, Any]:
        """The keys that are not ours, as given: keyword arguments for the builder or the source."""
        return dict(self.__pydantic_extra__ or {})

    def __eq__(self, other: object) -> bool:
        """Objects are the same only if they are one object: comparing tensors has no truth value."""
        if type(self) is not type(other) or not isinstance(other, OpenSection):
            return NotImplemented
        mine, theirs = dict(self.__dict__), dict(other.__dict__)
        pairs = [(mine.pop(name), theirs.pop(name)) for name in self.objects]
        return all(_same_object(*pair) for pair in pairs) and mine == theirs and self.keys == other.keys

    __hash__ = None  # type: ignore[assignment]


def _same_object(left: Any, right: Any) -> bool:
    return left is right or (isinstance(left, str) and isinstance(right, str) and left == right)


class ModelConfig(OpenSection):
    """What is trained: a builder ``module:function`` with its keys, or an ``nn.Module`` from Python."""

    objects: ClassVar[tuple[str, ...]] = ("module",)
    builder: Builder | None = Field(default=None, description="module:function that returns the model")
    module: Annotated[Any, AfterValidator(_python_object)] = Field(
        default=None, repr=False, description="an nn.Module, from Python only"
    )
    init_from: Text | None = Field(
        default=None, description="weights to start from: a run folder, one of transformers, a safetensors file"
    )


class DataConfig(OpenSection):
    """What it is trained on: a source with its keys, or datasets from Python."""

    objects: ClassVar[tuple[str, ...]] = ("train", "eval")
    source: Source | None = Field(default=None, description="a built-in source, or module:function of your own")
    storage: Literal["auto", "resident", "pinned", "stream"] = Field(
        default="auto", description="whole split on the device, or batches sent to it"
    )
    loader_workers: NonNegativeInt | Auto = Field(
        default="auto", description="processes that read a streamed dataset; 0: the training process"
    )
    prefetch: Count = Field(default=2, description="batches that each of them has ahead")
    tokens_per_batch: Count | None = Field(
        default=None, description="tokens of a micro-batch at most, padding included; null: by rows"
    )
    eval_fraction: Share = Field(default=0.1, description="part of the data kept for evaluation")
    train: Annotated[Any, AfterValidator(_python_object)] = Field(
        default=None, repr=False, description="a dataset, from Python only"
    )
    eval: Annotated[Any, AfterValidator(_python_object)] = Field(
        default=None, repr=False, description="a dataset, from Python only"
    )


class OptimConfig(Section):
    """How weights are updated."""

    name: Literal["adamw", "sgd", "muon"] = Field(
        default="adamw", description="the optimizer; muon: on the matrices of blocks, with AdamW on the rest"
    )
    lr: Positive = Field(default=1e-3, description="peak learning rate")
    weight_decay: NonNegative = Field(default=0.1, description="decay of matrices; vectors have none")
    betas: Betas = Field(default=(0.9, 0.99), description="AdamW's two decay rates")
    momentum: Share = Field(default=0.9, description="momentum of SGD and Muon")
    eps: Positive = Field(default=1e-8, description="AdamW's denominator floor")
    fused: bool | Auto = Field(default="auto", description="one pass over memory; auto: where torch has it")
    schedule: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="after the warm-up")
    warmup_steps: NonNegativeInt | Auto = Field(default="auto", description="auto: the smaller of 100 steps and 5 %")
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="the last learning rate, as a part of lr"
    )
    max_grad_norm: NonNegative | None = Field(default=1.0, description="clip by global norm; 0 or null: off")
    scale_lr: Literal["none", "linear", "sqrt"] = Field(default="none", description="lr with the global batch size")


class PrecisionConfig(Section):
    """In which number format the forward and backward passes run."""

    dtype: Literal["auto", "fp64", "fp32", "tf32", "bf16", "fp16"] = Field(
        default="auto", description="auto: by capability and a measured comparison"
    )
    fallback: bool = Field(default=True, description="go on in a wider format where this one fails")
    fp32_layers: list[Text] | Auto = Field(
        default=[], description="modules that stay in fp32 under bf16 or fp16; auto: those that must, measured"
    )


class LoopConfig(Section):
    """How long, in which batches, and how often something is said."""

    max_steps: Count | None = Field(default=None, description="optimizer steps; with epochs, whichever ends first")
    epochs: Count | None = Field(default=None, description="passes over the data; neither given: one")
    global_batch_size: Count | Auto = Field(default=32, description="samples per optimizer step, over all workers")
    micro_batch_size: Count | Auto = Field(default="auto", description="samples per forward pass of one worker")
    eval_every: Count | Auto = Field(default="auto", description="steps between evaluations; always at the end")
    eval_batches: Count | None = Field(default=None, description="global batches that an evaluation scores; null: all")
    eval_clear_every: Count | None = Field(
        default=None, description="batches of an evaluation after which cached memory is given back; null: never"
    )
    grow_after: Count | None = Field(
        default=100, description="clean steps until a micro-batch halved for memory is tried larger; null: never"
    )
    log_every: NonNegativeInt = Field(default=10, description="steps between train rows; 0: only the last step")
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = Field(
        default="off", description="torch.compile mode"
    )
    compile_parts: Literal["auto", "all", "blocks"] | list[Text] = Field(
        default="auto", description="what is compiled: names of modules, or ends of names; auto: blocks, else all"
    )
    activation_checkpointing: bool | Count = Field(
        default=False, description="recompute activations to save memory: true for each block, N for every Nth"
    )
    cudnn_benchmark: bool | Auto = Field(
        default="auto", description="search for the fastest kernel of each shape; auto: on a GPU, while shapes are few"
    )
    mask_cache_mb: NonNegative = Field(default=8.0, description="MiB of attention masks kept; 0: none")
    reference: bool = Field(default=False, description="the plain path: every key that makes it faster is switched off")
    deterministic: bool = Field(default=False, description="deterministic kernels, also on a GPU")
    patience: Count | None = Field(default=None, description="evaluations without improvement before an early stop")
    min_delta: NonNegative = Field(default=0.0, description="the least fall in eval loss that counts")


class SaveConfig(Section):
    """Where a run is written and how often its state is saved."""

    every: Count | Auto = Field(default="auto", description="steps between checkpoints; auto: 3 % of the time")
    keep: Count | Literal["all"] = Field(default=3, description="newest checkpoints kept, besides the best")
    dir: Text = Field(default="runs", description="folder or URI that run folders are made in")
    asynchronous: bool = Field(default=True, description="write in the background while training goes on")


class ScaleConfig(Section):
    """On how many workers, of what kind, and how the model is spread over them."""

    workers: Count | Auto | WorkerRange = Field(default="auto", description="a number, or [min, max] for elastic")
    mode: Literal["auto", "cpu", "single_gpu", "multi_gpu"] = Field(default="auto", description="kind of machine")
    strategy: Literal["auto", "data_parallel", "fsdp", "expert_parallel"] = Field(
        default="auto", description="how the model is spread over the workers"
    )
    accelerator: Text | None = Field(default=None, description="cpu, cuda, cuda:0, or a type such as H100")
    threads: Count | Auto = Field(default="auto", description="CPU threads of each worker")
    shares: Literal["auto", "equal"] = Field(default="equal", description="micro-batches per worker")
    overlap: bool | Auto = Field(default="auto", description="sum gradients while the last backward still runs")


class RetryConfig(Section):
    """When a run gives up, and how long it waits."""

    restarts_without_progress: NonNegativeInt = Field(default=3, description="restarts without a new step, then stop")
    nonfinite_steps: Count = Field(default=3, description="non-finite steps in a row, then roll back")
    rollbacks: NonNegativeInt = Field(default=3, description="roll-backs, then stop")
    stop_grace_s: NonNegative = Field(default=60.0, description="seconds to save in after a stop signal")
    host_wait_s: NonNegative = Field(default=30.0, description="seconds to wait for a new expert host")


class TuneFound(Section):
    """What a search measured; `train` confirms it at its start."""

    signature: Text = Field(description="hash of all that the figures depend on")
    facts: dict[str, Any] = Field(default={}, description="what the hash is of, for people")
    precision: Text = Field(description="the precision that was chosen")
    micro_batch_size: Count = Field(description="samples per forward pass of one worker")
    step_s: Positive = Field(description="seconds of one optimizer step of one worker")
    peak_bytes: Count | None = Field(default=None, description="the most one worker had; null: not measured")
    device: Text = Field(default="cpu", description="name of the device")
    also: list[Text] = Field(default=[], description="hashes of the other kinds of devices that were searched")


class TuneConfig(Section):
    """The search over batch size and precision, or over whichever keys `space` names."""

    objective: Literal["throughput", "goodput"] = Field(default="throughput", description="what is maximised")
    space: dict[str, Any] | None = Field(default=None, description="key -> values to try; null: batch and precision")
    metric: Literal["eval_loss", "samples_per_s"] = Field(
        default="eval_loss", description="what decides between trials of tune.space: the least, or the most"
    )
    scheduler: Literal["none", "asha", "median"] = Field(
        default="none", description="ends trials of tune.space early whose evaluations are behind"
    )
    max_trials: Count | None = Field(default=None, description="at most so many trials")
    fresh: bool = Field(default=False, description="ignore results of earlier searches")
    found: TuneFound | None = Field(default=None, description="what a search had found, written by it into best.yaml")


class InferConfig(Section):
    """Batch inference over a finished run's weights."""

    input: Text | None = Field(default=None, description="what to read")
    output: Text | None = Field(default=None, description="where to write; null: predictions/ of the run")
    batch_size: Count | Auto = Field(default="auto", description="samples per forward pass")
    max_samples: Count | None = Field(default=None, description="stop after so many samples")
