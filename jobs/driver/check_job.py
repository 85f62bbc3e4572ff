"""Checks a job on the driver before Ray starts, and makes the `TrainJob` that the workers get.

For `train`, `tune`, `check` and `plan --build`: opens the data, builds the model, tries the first batch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from experts.exchange.membership import Connection
from jobs.driver.build import build, check_experts, counted, opened
from jobs.driver.first_batch import FirstBatch, FirstPass, certainly_on_cpu, check_first_batch, data_key
from jobs.driver.sharded_pass import check_sharded_pass
from jobs.job.facts import formula_facts, uses_hosts
from jobs.job.spec import JobSpec
from raytrain.checkpoint.reader import list_checkpoints, read_manifest
from raytrain.config.messages import abbreviated
from raytrain.config.user_code import check_shadowing, make_importable, resolve, users_errors
from raytrain.data.rows.batches import check_budget
from raytrain.data.rows.contract import Source, Split
from raytrain.data.rows.map_style import DatasetSplit, generators_kept, observed_facts, spread_rows
from raytrain.data.sources.in_memory import check_kind
from raytrain.data.sources.open import check_label, read_on_driver, source_from_driver
from raytrain.errors import CheckpointError, InputError, first_line
from raytrain.execution.reporter import load_observers
from raytrain.models.blocks import blocks_of
from raytrain.models.huggingface import check_names, stored_names
from raytrain.models.weights.headers import find_weights
from raytrain.models.weights.stored import StartingWeights
from raytrain.plan.facts import DataFacts, ModelFacts
from raytrain.plan.plan import Plan
from raytrain.runs.folder import RunFolder, this_process
from raytrain.train.compile import parts_to_compile
from raytrain.train.job import TrainJob, differences, source_facts
from raytrain.train.module_checks import check_module
from raytrain.train.optim import hidden_matrices, muons_blocks
from raytrain.train.placing import make_sendable
from raytrain.train.precision import parts_named
from raytrain.trainable import Trainable

# ---------------------------------------------------------------- sendable
# Checks that the Python objects of a job can be pickled, as the workers get copies of them.


_PICKLER = "raytrain_ray_cloudpickle"
#: Levels of attributes that are searched for the part that cannot be pickled.
_DEPTH = 8
#: Types that can be pickled and may be large: their content is not copied to find out.
_LARGE = (torch.Tensor, nn.Parameter, torch.UntypedStorage)


def check_sendable(spec: JobSpec) -> None:
    """Check that each Python object of a job can be pickled."""
    model, data = spec.model, spec.data
    named = {"model.module": model.module, "data.train": data.train, "data.eval": data.eval,
             "data.collate": data.collate}  # fmt: skip
    named |= {
        f"{name}.{key}": value for name, one in (("model", model), ("data", data)) for key, value in one.keys.items()
    }
    for key, value in named.items():
        if value is None or isinstance(value, bool | int | float | str):
            continue
        module = value.module if isinstance(value, Trainable) else value
        if isinstance(module, nn.Module):
            make_sendable(module)
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:  # torch leaves them out
                    kind = type(module).__name__
                    raise InputError(
                        key, got=f"a {kind} with a hook on the tensor {name}, which no worker would receive",
                        expected="hooks on modules only",
                        remedy="register it in a function that builds the model, and name that as model.builder",
                    )  # fmt: skip
        error = _refusal(value)
        if error is None:
            continue
        if key in ("data.train", "data.eval"):
            check_kind(value, key=key)
        path, part = _culprit(value)
        seen = f"a {type(value).__name__} whose attribute {path} (a {_kind(part)}) cannot be sent to the workers"
        if not path:
            seen = f"a {type(value).__name__}, which cannot be sent to the workers ({first_line(error)})"
        raise InputError(
            key, got=seen, expected="an object that can be pickled",
            remedy="create that part where it is first used, or leave it out in __getstate__",
        )  # fmt: skip


def _refusal(value: Any) -> Exception | None:
    """The error with which a value refuses to be pickled; None if it can be."""
    if type(value).__module__.split(".")[0] in ("ray", "pyarrow"):
        return None
    try:
        nowhere = SimpleNamespace(write=len)  # a file that forgets what is written to it
        _pickler().Checking(nowhere, protocol=5, buffer_callback=lambda _buffer: None).dump(value)
    except Exception as error:  # of any type: a class may define how it is pickled
        return error
    return None


def _pickler() -> Any:
    """Ray's cloudpickle, with the class `Checking`, which does not copy large tensors."""
    if _PICKLER not in sys.modules:
        package = importlib.util.find_spec("ray")
        assert package is not None and package.origin is not None
        path = os.path.join(os.path.dirname(package.origin), "cloudpickle", "cloudpickle.py")
        found = importlib.util.spec_from_file_location(_PICKLER, path)
        assert found is not None and found.loader is not None
        module: Any = importlib.util.module_from_spec(found)
        sys.modules[_PICKLER] = module  # what it pickles refers to it by this name
        found.loader.exec_module(module)

        class Checking(module.Pickler):
            def reducer_override(self, obj: Any) -> Any:
                if type(obj) in _LARGE or type(obj).__module__ == "pyarrow.lib":
                    return int, ()
                return super().reducer_override(obj)

        module.Checking = Checking
    return sys.modules[_PICKLER]


def _culprit(value: Any) -> tuple[str, Any]:
    """The innermost part that cannot be pickled, and its name; "" if that is the value itself."""
    names, part, seen = [], value, {id(value)}
    while len(names) < _DEPTH:
        for name, child in _parts(part):
            if id(child) not in seen and _refusal(child) is not None:
                seen.add(id(child))
                names.append(name)
                part = child
                break
        else:
            break
    return ".".join(names), part


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of what belongs to an object: submodules under their own names, as in a state dict."""
    if isinstance(value, FunctionType):
        yield from zip(value.__code__.co_freevars, map(_content, value.__closure__ or ()), strict=True)
        yield from ((name, value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__)
    elif isinstance(value, Mapping):
        yield from ((str(name), child) for name, child in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), child) for index, child in enumerate(value))
    else:
        if isinstance(value, nn.Module):
            yield from value.named_children()
        yield from getattr(value, "__dict__", {}).items()
        if (bound := getattr(value, "__self__", None)) is not None:  # of a method
            yield type(bound).__name__, bound


def _content(cell: CellType) -> Any:
    """The variable that a function closes over; None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _kind(value: Any) -> str:
    """The name of a class as Python writes it in errors: with its module, if that is not the user's."""
    module = type(value).__module__
    return type(value).__name__ if module in ("builtins", "__main__") else f"{module}.{type(value).__name__}"


# ---------------------------------------------------------------- job
# Checks a job on the driver before Ray starts (`train`, `tune`, `plan --build`) and makes the workers' job.


MODEL_FILE = "model.safetensors"


@dataclass(frozen=True)
class Checked:
    """The result of `check_on_driver`."""

    source: Source
    handed: Any  # the data to send to the workers; None if they open it themselves
    model_facts: ModelFacts
    data_facts: DataFacts
    shapes: dict[str, Any]  # facts of the data that a builder may take (`source_facts`)
    first: FirstPass  # what a micro-batch has shown

    @property
    def note(self) -> str | None:
        """A line for people if something was not checked."""
        skipped = self.first.skipped
        return None if skipped is None else f"the first micro-batch is not tried before the start: {skipped}"


def check_on_driver(spec: JobSpec, *, resumed: RunFolder | None = None, run_batch: bool = True) -> Checked:
    """Open the data and build the model once, and run a micro-batch, to find mistakes before anything starts.

    Args:
        resumed: a run whose checkpoint is loaded, instead of the weights of `model.init_from`.
        run_batch: whether to run one micro-batch forward and backward.
    """
    make_importable(os.getcwd())
    check_shadowing()
    load_observers(spec.telemetry.observers, resolve)
    check_label(spec.data, builder=spec.model.builder)
    check_sendable(spec)
    sent = read_on_driver(spec.data)
    with users_errors(partial(data_key, spec), "while the data was opened"):
        source = source_from_driver(sent, spec.data, context=spec.model.keys.get("context")) or opened(spec)
        check_budget(source.train, source.eval, spec.data.tokens_per_batch)
        if spec.experts.lifecycle.replay.bytes is not None:
            check_one_length(source.train)
        shapes = source_facts(source)
    trainable, where = build(spec, shapes)
    check_module(trainable, key=spec.model.origin, strategy=spec.scale.strategy)
    parameters = list(trainable.module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        key = spec.model.origin
        seen = "a model whose parameters are all frozen" if parameters else "a model without parameters"
        raise InputError(key, got=seen, expected="at least one parameter that requires a gradient")
    if resumed is not None:
        check_fits(trainable.module, resumed)
    elif spec.model.init_from is not None:
        StartingWeights(spec.model.init_from).check(trainable.module, trainable.translate)
    start = resumed.path if resumed is not None else spec.model.init_from
    if start is not None and spec.data.keys.get("class_names", "auto") == "auto":
        check_names(source.class_names, stored_names(start), key="data.label")
    if spec.precision.fp32_layers != "auto":
        parts_named(trainable.module, spec.precision.fp32_layers)
    if spec.loop.compile not in ("off", "auto") or spec.loop.compile_parts != "auto":
        parts_to_compile(trainable, spec.loop)
    if spec.loop.activation_checkpointing:
        blocks_of(trainable, key="loop.activation_checkpointing")
    if spec.optim.name == "muon" and trainable.optimizers is None:
        hidden_matrices(trainable.module, muons_blocks(trainable, spec.optim))
    check_experts(spec, shapes, remote=uses_hosts(spec))
    if spec.scale.sync_batchnorm and not any(isinstance(part, _BatchNorm) for part in trainable.module.modules()):
        seen = "true with a model without batch norms"
        raise InputError("scale.sync_batchnorm", got=seen, expected="false for this model")
    model_facts = formula_facts(spec, shapes)
    found = FirstPass()
    if run_batch:
        first = FirstBatch(spec, source, shapes, trainable, on_cpu=certainly_on_cpu(spec))
        found = check_first_batch(first, count=model_facts is None)
        if found.skipped is None and spec.scale.strategy == "fsdp":
            check_sharded_pass(first)
    model_facts = model_facts or counted(trainable, where, found.sizes)
    data_facts = observed_facts(source.facts, source.train)
    return Checked(source, sent or source.worker_data, model_facts, data_facts, shapes, found)


ITEMS_COMPARED = 16


def check_one_length(train: Split) -> None:
    """Check that rows can be kept for replay: that all have one shape. Of a dataset of items a sample is read."""
    order = train.eval_order()
    lengths = train.lengths(order)
    seen = [] if lengths is None else [f"{tokens} tokens" for tokens in sorted({*lengths.tolist()})]
    if lengths is None and isinstance(train, DatasetSplit) and len(train):
        with generators_kept():
            sample = [train.gather(order[[row]]) for row in spread_rows(len(train), ITEMS_COMPARED)]
        shapes = [sorted({tuple(row[name].shape[1:]) for row in sample}) for name in sample[0]]
        seen = [f"shape {shape}" for shape in max(shapes, key=len)]
    if len(seen) > 1:
        raise InputError(
            "experts.lifecycle.replay.bytes", got=f"rows of {seen[0]} and of {seen[-1]}", expected="rows of one shape",
            remedy="pad them to one length in data.source, or leave the key out: nothing is replayed then",
        )  # fmt: skip


def check_fits(module: nn.Module, run: RunFolder) -> None:
    """Check that the newest checkpoint of a run has the tensors of this model, by its file's header: the code of the
    model may have changed. A checkpoint in several files, on other storage or unreadable is left to the workers."""
    saved = [info for info in list_checkpoints(run) if info.complete]
    if not saved or "://" in saved[-1].path:
        return
    try:
        manifest = read_manifest(saved[-1].path)
        if manifest["parts"].get("model") != [MODEL_FILE] or manifest.get("experts") is not None:
            return
        stored = find_weights(saved[-1].path, key="--resume")
    except (CheckpointError, OSError, InputError):
        return
    held: dict[str, Any] = {name: torch.empty(shape, device="meta") for name, shape in stored.shapes.items()}
    held |= stored.extra
    wrong = differences(module.state_dict(), held, shapes=lambda one: {one.shape})
    if wrong:
        raise InputError(
            "--resume", got=f"the checkpoint of step {saved[-1].step} of another model: {abbreviated(wrong, 5)}",
            expected="the model that the run has trained",
            remedy="restore its code, or start a new run",
        )  # fmt: skip


def train_job(
    spec: JobSpec,
    plan: Plan,
    run: RunFolder,
    *,
    attempt: int,
    claimed: int | None = None,
    connection: Connection | None = None,
) -> TrainJob:
    """Make the job that the workers receive.

    Args:
        attempt: number of this command's first attempt.
        claimed: the number that the driver took for the next attempt, if that is not the first.
        connection: how a builder reaches the expert hosts, if there are some.
    """
    sections = ("seed", "model", "data", "optim", "precision", "loop", "save", "retry", "cluster")
    telemetry = spec.telemetry
    return TrainJob(
        **{name: getattr(spec, name) for name in sections},
        observers=list(telemetry.observers), tensorboard=telemetry.tensorboard, telemetry_every=telemetry.every,
        log_memory=telemetry.log_memory, plan=plan, run_path=run.path, import_path=os.getcwd(), owner=this_process(),
        first_attempt=attempt, claimed_attempt=claimed or attempt,
        builder_sections={"experts": spec.experts.connected(connection)},
    )  # fmt: skip
