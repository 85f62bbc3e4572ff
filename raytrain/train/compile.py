"""Options that save time or memory in a worker's steps: compiled parts of a model, and the switches around them.

`Switches` is applied once, when a session is built. A part that cannot be compiled runs eagerly, and the run records
why.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cluster.devices.inventory import missing_for_compile
from raytrain.accelerator import on_gpu
from raytrain.config.messages import near_names
from raytrain.config.sections import LoopConfig
from raytrain.data.rows.contract import Source
from raytrain.data.rows.map_style import longest_row
from raytrain.errors import InputError, first_line
from raytrain.models.attention import MaskCache
from raytrain.models.blocks import Block, blocks_of, called_modules, repeated
from raytrain.train.activation_checkpointing import Recomputed, recompute
from raytrain.train.device import CudnnBenchmark
from raytrain.train.job import TrainJob
from raytrain.train.parallel.collectives import Workers
from raytrain.train.precision import PrecisionPolicy, put_back
from raytrain.trainable import Trainable

KEY = "loop.compile_parts"


def parts_to_compile(
    trainable: Trainable, loop: LoopConfig, *, on_gpu: bool = False, sharded: bool = False
) -> list[Block]:
    """The parts to compile, outermost first; ("", module) is the full model.

    On a GPU `auto` is `all` where nothing divides the model: blocks alone leave the head and the loss, a quarter of a
    GPT-2's step. Rows that are routed to experts cut graphs in each block. Elsewhere `auto` selects the blocks if the
    model names them, if it repeats blocks with several layers (they share compiled code, so the compile time does not
    grow with their number), or if backward recomputes them. A name selects every module whose dotted name ends with it:
    `router` selects the routers of all blocks.

    Raises:
        InputError: the model has no module of that name, or no blocks although they are requested, or a part contains
            blocks that are recomputed in backward.
    """
    module, asked = trainable.module, loop.compile_parts
    graphs = on_gpu and loop.compile == "reduce-overhead"  # CUDA graphs work for the full model only
    divided = loop.activation_checkpointing or sharded or trainable.worst_case is not None
    if asked == "auto" and (graphs or (on_gpu and not divided)):
        asked = "all"
    if asked == "auto":
        several = any(next(block.children(), None) is not None for _, block in repeated(module))
        by_blocks = trainable.blocks is not None or several or loop.activation_checkpointing
        asked = "blocks" if by_blocks else "all"
    if asked == "all":
        parts: list[Block] = [("", module)]
    elif asked == "blocks":
        parts = blocks_of(trainable, key=KEY)
    else:
        every = {name: part for name, part in module.named_modules() if name}
        chosen: list[Block] = []
        for name in asked:
            found = [(full, part) for full, part in every.items() if full == name or full.endswith(f".{name}")]
            if not found:
                ends = {full.rpartition(".")[2] for full in every if not full.rpartition(".")[2].isdigit()}
                raise InputError(
                    KEY, got=name, expected="auto, all, blocks, or names of the model's modules, or ends of such names",
                    remedy=near_names(name, [*ends, *every], otherwise=sorted(ends)),
                )  # fmt: skip
            chosen += [block for full, part in found for block in called_modules(full, part)]
        kept = {id(inner) for _, part in chosen for inner in part.modules() if inner is not part}
        parts = list({id(part): (name, part) for name, part in chosen if id(part) not in kept}.values())
    if graphs and len(parts) > 1:
        raise InputError(
            KEY, got=f"{len(parts)} parts with loop.compile reduce-overhead on a GPU", expected="all, or loop.compile"
            " default", remedy="torch refuses to pass the output of one CUDA graph to another (pytorch #152887)",
        )  # fmt: skip
    if loop.activation_checkpointing:
        again = {id(block): name for name, block in blocks_of(trainable, key="loop.activation_checkpointing")}
        for name, part in parts:
            inside = [again[id(inner)] for inner in part.modules() if inner is not part and id(inner) in again]
            if inside:
                raise InputError(
                    KEY, got=f"{name or 'the whole model'}, around {inside[0]}",
                    expected="blocks, or parts of them, with loop.activation_checkpointing",
                    remedy="loop.compile_parts: blocks; a compiled part cannot contain blocks that backward recomputes",
                )  # fmt: skip
    return parts


# ---------------------------------------------------------------- compile


Lower = Callable[[Any, list[Any]], Callable[..., Any]]
"""A backend: takes a graph and example inputs, returns a callable that computes the same."""

#: The precisions compared at the start, training and evaluation, and batches of one row each compile their own variant;
#: torch's default limit of 8 would silently fall back to eager.
VARIANTS_AT_MOST = 64
#: Static shapes of one part, each compiled once: batches, smaller last ones and those of evaluation, in each precision
#: that was compared. With more its shapes vary, and are dynamic from then on.
STATIC_AT_MOST = 8
#: torch's max-autotune makes CUDA graphs too, which fail where parts are compiled one by one (pytorch #152887); it is
#: chosen for its kernels.
MODES = {"max-autotune": "max-autotune-no-cudagraphs"}
#: Maximum reasons of each kind in a record.
LISTED_AT_MOST = 5


@dataclass
class PartStatus:
    """Compilation status of one part of the model.

    Attributes:
        graph_breaks, recompiles: likewise; a batch of one row, evaluation and another precision recompile once each.
        variants: how often each frame was compiled while the part was called.
        breaks_at: graph breaks and their number; shared by the parts of one class, which share compiled code.
    """

    name: str  # dotted name of the part ("" is the full model)
    kind: str  # class of the part
    frames: set[str] = field(default_factory=set)  # frames compiled by all parts; shared by all parts
    breaks_at: dict[str, int] = field(default_factory=dict)
    variants: Counter[str] = field(default_factory=Counter)
    entered: int = 0  # calls of the part
    calls: int = 0  # calls of its compiled graphs
    graphs: int = 0  # graphs compiled while the part was called; equal parts share those of the first
    graph_breaks: int = 0
    recompiles: int = 0
    seconds: float = 0.0  # time spent in the compiler
    reason: str = ""  # why some or all of it runs eager; "" if nothing failed

    @property
    def achieved(self) -> str:
        """ "compiled", "partly" (some graphs or frames run eager), "eager", or "not run"."""
        if self.calls:
            return "partly" if self.reason else "compiled"
        return "eager" if self.entered else "not run"

    @property
    def why(self) -> str:
        """Why the part is not fully compiled; "" if it is, or has not been called yet."""
        if self.reason or self.achieved != "eager":
            return self.reason
        return f"nothing in it could be traced: {', '.join(list(self.breaks_at)[:1]) or 'torch says no more'}"

    def to_json(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("graphs", "graph_breaks", "recompiles")}
        return {"name": self.name or "model", "kind": self.kind, "achieved": self.achieved, **counts,
                "seconds": self.seconds, "reason": self.why}  # fmt: skip


@dataclass
class _Here(threading.local):
    """The part that the current thread is executing, and the state of its running compilation."""

    part: PartStatus | None = None
    began: float = 0.0
    breaks: dict[str, int] = field(default_factory=dict)
    failing: BaseException | None = None
    quiet: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    graphs: bool = False


_HERE = _Here()


class CompiledParts:
    """Compiles parts of a module, none nested in another, in place and tracks their status; calls run the compiled code
    while it is `on`.

    Args:
        static: the inputs of the parts have few shapes.
        graphs: the mode records CUDA graphs on this device.
        lower: a backend that replaces torch's inductor (for tests).
    """

    def __init__(
        self, parts: Sequence[tuple[str, nn.Module]], *, mode: str, static: bool = False, graphs: bool = False,
        lower: Lower | None = None,
    ) -> None:  # fmt: skip
        self.mode, self.on, _HERE.graphs = mode, True, graphs
        frames, breaks = set[str](), {type(part): dict[str, int]() for _, part in parts}
        self._breaks = list(breaks.values())
        self.parts = [PartStatus(name, type(part).__name__, frames, breaks[type(part)]) for name, part in parts]
        self._forwards: dict[Any, Any] = {}
        self._taken = 0.0
        self._reported: tuple[Any, ...] = ()
        _watch()
        backend = _backend(mode, lower)
        for status, (_, part) in zip(self.parts, parts, strict=True):
            for inner in part.modules():  # methods that a module excludes from compilation
                for name in getattr(inner, "never_compiled", ()):
                    setattr(inner, name, torch.compiler.disable(getattr(inner, name)))
            # inside the recomputation of activations: backward calls the compiled part again
            holder: Any = part.forward if isinstance(part.forward, Recomputed) else part
            self._forwards[holder] = holder.__dict__.get("forward")
            holder.forward = _Compiled(self, status, holder.forward, backend, static=static)

    def off(self) -> None:
        """Restore the original forward of every part; the counts remain."""
        put_back(self._forwards)
        self._forwards = {}

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        self.on = False
        try:
            yield
        finally:
            self.on = True

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    def take_seconds(self) -> float:
        """Seconds of the compiler since the last call."""
        spent, self._taken = self.seconds - self._taken, self.seconds
        return spent

    def changed_status(self) -> dict[str, Any] | None:
        """Return `status` if it has changed since the last call, ignoring call counts; else None."""
        now = tuple((part.achieved, part.graphs, part.graph_breaks, part.reason) for part in self.parts)
        if now == self._reported:
            return None
        self._reported = now
        return self.status()

    def status(self) -> dict[str, Any]:
        """The record of the run: requested mode, totals, and each part."""
        achieved = [part.achieved for part in self.parts]
        totals = {name: sum(getattr(part, name) for part in self.parts)
                  for name in ("graphs", "graph_breaks", "recompiles")}  # fmt: skip
        reasons = list(dict.fromkeys(part.why for part in self.parts if part.why))
        return {
            "requested": self.mode,
            "achieved": f"{achieved.count('compiled')} of {len(achieved)} parts",
            **totals,
            "seconds": self.seconds,
            "reasons": reasons[:LISTED_AT_MOST],
            "breaks_at": list(dict.fromkeys(where for breaks in self._breaks for where in breaks))[:LISTED_AT_MOST],
            "parts": [part.to_json() for part in self.parts],
        }


def forget_graphs() -> None:
    """Free this process's CUDA graphs when the batch size changes: no other allocation can use their memory. Sizes that
    are still in use are compiled again, mostly from inductor's cache."""
    if _HERE.graphs:
        torch._dynamo.reset()  # resetting the graphs alone would leave compiled code that refers to them
        _watch()
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


class _Compiled:
    """A part's compiled forward; marks its part as the current one while it runs."""

    def __init__(
        self, parts: CompiledParts, status: PartStatus, forward: Callable[..., Any], backend: Any, *, static: bool
    ) -> None:
        self._parts, self._status, self._eager, self._static = parts, status, forward, static
        self._compiled = [torch.compile(forward, backend=backend, dynamic=one) for one in (True, False)]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not self._parts.on:
            return self._eager(*inputs, **named)
        before, _HERE.part = _HERE.part, self._status
        self._status.entered += 1
        try:
            return self._compiled[self._static](*inputs, **named)
        finally:
            _HERE.part = before
            # what passes a graph break may be a number of Python, each of which would be compiled as a constant
            allowed = 2 if self._status.graph_breaks else STATIC_AT_MOST
            self._static = self._static and max(self._status.variants.values(), default=0) < allowed


@dataclass
class _Graph:
    """One compiled graph, or the traced graph if the backend failed."""

    run: Callable[..., Any]
    failed: str = ""

    def __call__(self, *inputs: Any) -> Any:
        part = _HERE.part
        if part is not None:
            part.calls += not self.failed
            part.reason = part.reason or self.failed
        return self.run(*inputs)


@functools.cache
def _backend(mode: str, lower: Lower | None) -> Callable[[Any, list[Any]], Callable[..., Any]]:
    """The backend of a mode, one per process: torch shares compiled code only for the identical backend object."""
    from torch._dynamo.exc import RestartAnalysis
    from torch._functorch import config as autograd_config

    chosen: Any = lower or torch._TorchCompileInductorWrapper(MODES.get(mode, mode), None, True)

    def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        """Compile forward and backward now, so that either one fails before anything has run."""
        try:
            with autograd_config.patch(force_non_lazy_backward_lowering=True):
                made = _Graph(chosen(graph, inputs))
        except RestartAnalysis:  # torch's signal to trace again
            raise
        except Exception as error:  # the traced graph computes the same, whatever the compiler raised
            made = _Graph(graph.forward, failed=_named(error))
        if _HERE.part is not None:
            _HERE.part.graphs += not made.failed
            _HERE.part.reason = _HERE.part.reason or made.failed
        return lambda *values: made(*values)

    return backend


def _named(error: BaseException) -> str:
    cause: BaseException = getattr(error, "inner_exception", None) or error
    return f"{type(cause).__name__}: {first_line(cause)}"


# -- callbacks of torch's compiler -----------------------------------------------------------------


def _watch() -> None:
    """Configure torch's compiler in this process: frames that cannot be traced run as written, and callbacks attribute
    compilations to the current part, and ignore warnings in them, which as errors would count as its failures."""
    import torch._dynamo.config
    from torch._dynamo.callback import callback_handler

    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = VARIANTS_AT_MOST
    if _started not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_started)
        callback_handler.register_end_callback(_ended)
        # torch's manager of CUDA graphs records an empty one on purpose, outside of any compilation
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")


def _started(_about: Any) -> None:
    _HERE.began, _HERE.breaks, _HERE.failing = time.perf_counter(), _breaks(), sys.exc_info()[1]
    if _HERE.part is not None:
        _HERE.quiet.enter_context(warnings.catch_warnings(action="ignore"))


def _ended(about: Any) -> None:
    part, error = _HERE.part, sys.exc_info()[1]
    _HERE.quiet.close()
    if part is None:  # compiled by other code
        return
    part.seconds += time.perf_counter() - _HERE.began
    for reason, count in _breaks().items():
        more = count - _HERE.breaks.get(reason, 0)
        if more:
            part.graph_breaks += more
            part.breaks_at[reason] = part.breaks_at.get(reason, 0) + more
    frame = str(about.compile_id).rpartition("/")[0]
    part.recompiles += frame in part.frames
    part.frames.add(frame)
    part.variants[frame] += about.callback_trigger.name == "DYNAMO"  # and not a CUDA graph that is recorded
    if part.variants[frame] >= VARIANTS_AT_MOST:
        part.reason = part.reason or f"compiled {VARIANTS_AT_MOST} times, the limit: what differs from them runs eager"
    from torch._dynamo.exc import RestartAnalysis, SkipFrame, Unsupported

    breaks = RestartAnalysis | SkipFrame | Unsupported  # only a break of a graph, counted above
    if error is not None and error is not _HERE.failing and not isinstance(error, breaks):
        part.reason = part.reason or _named(error)


def _breaks() -> dict[str, int]:
    import torch._dynamo.utils

    return {reason.partition("\n")[0]: n for reason, n in torch._dynamo.utils.counters["graph_break"].items()}


# ---------------------------------------------------------------- switches


MEGABYTE = 2**20


class Switches:
    """Compilation (on all workers or on none), activation checkpointing, cuDNN's kernel search and the budget of mask
    caches; changes the trainable in place."""

    def __init__(
        self, job: TrainJob, trainable: Trainable, source: Source, *, device: torch.device, workers: Workers,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        self._job, self._trainable, self._source, self._device, self._workers = job, trainable, source, device, workers
        loop, self._notices = job.loop, list[tuple[str, dict[str, Any]]]()
        self.cudnn = CudnnBenchmark(loop.cudnn_benchmark, device=device, deterministic=loop.deterministic)
        held = (part.__dict__.get("masks") for part in trainable.module.modules())
        self.masks = [cache for cache in held if isinstance(cache, MaskCache)]
        for cache in self.masks:
            cache.budget = int(loop.mask_cache_mb * MEGABYTE)
        parts: list[Any] = list(trainable.module.modules())
        self._comparing = [part for part in parts if hasattr(type(part), "compare_kernels")]
        self.compiled: CompiledParts | None = None
        self.compile(compiled)
        if loop.activation_checkpointing:  # outside the compiled parts: backward calls the compiled part again
            recompute(trainable, every=int(loop.activation_checkpointing))

    def compile(self, compiled: bool) -> None:
        """Compile the model's parts, on all workers or on none, or stop doing so, as if nothing had been compiled.
        Collective."""
        self.end()
        self.compiled = None
        if not compiled:
            return
        job, trainable, device = self._job, self._trainable, self._device
        planned = job.plan.compile
        why = planned.reason if planned is not None and planned.value_or(None) == "off" else None
        why = why or missing_for_compile(device.type)
        if sum(self._workers.all_reduce_ints([int(why is not None)])):
            why = why or "another worker's machine cannot compile"
            refused = {"requested": job.loop.compile, "achieved": "off", "reasons": [why], "seconds": 0.0, "parts": []}
            self._notices.append(("compile", refused))
            return
        sharded = job.planned("strategy") == "fsdp"
        parts = parts_to_compile(trainable, job.loop, on_gpu=on_gpu(device), sharded=sharded)
        if trainable.reads_weight and any(part is trainable.module for _, part in parts):
            # a compiled graph would hide what the loss is a mean over (`raytrain.train.mean_weight`)
            for function in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
                torch._dynamo.disallow_in_graph(function)
        mode = "default" if job.loop.compile == "auto" else job.loop.compile
        splits = [split for split in (self._source.train, self._source.eval) if split is not None]
        varying = trainable.worst_case is not None or job.data.tokens_per_batch is not None
        varying = varying or any(getattr(split, "adds_mask", False) or longest_row(split) for split in splits)
        self.compiled = CompiledParts(
            parts, mode=mode, static=not varying, graphs=on_gpu(device) and mode == "reduce-overhead"
        )

    def compare_kernels(self, device: torch.device, policy: PrecisionPolicy) -> None:
        """Have the modules that can choose between kernels compare them, before anything is measured."""
        for part in self._comparing:
            part.compare_kernels(device, policy.autocast_dtype or policy.master_dtype)

    def observe(self, batch: dict[str, Any]) -> None:
        off = self.cudnn.observe(batch)
        if off is not None:
            self._notices.append(("decision", {"what": "cudnn_benchmark", **off}))

    def compile_seconds(self) -> float:
        return 0.0 if self.compiled is None else self.compiled.take_seconds()

    def notices(self) -> list[tuple[str, dict[str, Any]]]:
        notices, self._notices = self._notices, []
        for part in self._comparing:
            notices += [("fallback", {"what": "kernels", "reason": line}) for line in part.take_fallbacks()]
        compiled = None if self.compiled is None else self.compiled.changed_status()
        return notices if compiled is None else [*notices, ("compile", compiled)]

    def metrics(self) -> dict[str, Any]:
        """Fields for a logged row: contents and statistics of the mask caches, if the model has any."""
        return {"mask_cache": MaskCache.total(self.masks)} if self.masks else {}

    def end(self) -> None:
        """Switch compilation off after training: an export or text sample is not worth compiling for, and another
        session that takes over the module compiles it again."""
        if self.compiled is not None:
            self.compiled.off()
