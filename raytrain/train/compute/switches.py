"""Applies the options that save time or memory in a worker's steps; once, when a session is built."""

from __future__ import annotations

from typing import Any

import torch

from raytrain.data.rows.contract import Source, SplitView
from raytrain.data.rows.splits import TensorSplit
from raytrain.models.attention import MaskCache
from raytrain.train.compute.activation_checkpointing import recompute
from raytrain.train.compute.compile import CompiledParts
from raytrain.train.compute.compile_parts import parts_to_compile
from raytrain.train.compute.cudnn import CudnnBenchmark
from raytrain.train.compute.toolchain import missing_for_compile
from raytrain.train.job import TrainJob
from raytrain.train.parallel.collectives import Workers
from raytrain.train.precision.policy import PrecisionPolicy
from raytrain.trainable import Trainable

MEGABYTE = 2**20


class Switches:
    """Compilation, activation checkpointing, cuDNN's kernel search and the budget of mask caches.

    Args:
        job: its `loop` section and plan set the options.
        trainable: changed in place.
        source: whose batches the model gets.
        workers: either all of them compile, or none.
        compiled: whether to compile; see `StepSettings`.
    """

    def __init__(
        self, job: TrainJob, trainable: Trainable, source: Source, *, device: torch.device, workers: Workers,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        self._job, self._trainable, self._device, self._workers = job, trainable, device, workers
        self._fixed = _fixed_shapes(source) and job.data.tokens_per_batch is None and trainable.worst_case is None
        loop, self._notices = job.loop, list[tuple[str, dict[str, Any]]]()
        self.cudnn = CudnnBenchmark(loop.cudnn_benchmark, device=device, deterministic=loop.deterministic)
        held = (part.__dict__.get("masks") for part in trainable.module.modules())
        self.masks = [cache for cache in held if isinstance(cache, MaskCache)]
        for cache in self.masks:
            cache.budget = int(loop.mask_cache_mb * MEGABYTE)
        parts: list[Any] = list(trainable.module.modules())
        self._comparing = [part for part in parts if hasattr(type(part), "compare_kernels")]
        self.compiled: CompiledParts | None = None
        if compiled:
            self.compile()
        if loop.activation_checkpointing:  # outside the compiled parts: backward calls the compiled part again
            recompute(trainable, every=int(loop.activation_checkpointing))

    def missing(self) -> str | None:
        """Why a worker's machine cannot compile; None where all can. Collective."""
        planned = self._job.plan.compile
        why = planned.reason if planned is not None and planned.value_or(None) == "off" else None
        why = why or missing_for_compile(self._device.type)
        some = self._workers.all_reduce_ints([int(why is not None)])[0]
        return why or ("another worker's machine cannot compile" if some else None)

    def compile(self) -> None:
        """Compile the model's parts, on all workers or on none. Collective."""
        job, trainable, device = self._job, self._trainable, self._device
        if (why := self.missing()) is not None:
            refused = {"requested": job.loop.compile, "achieved": "off", "reasons": [why], "seconds": 0.0, "parts": []}
            self._notices.append(("compile", refused))
            return
        on_gpu, sharded = device.type == "cuda", job.planned("strategy") == "fsdp"
        parts = parts_to_compile(trainable, job.loop, on_gpu=on_gpu, sharded=sharded)
        if trainable.reads_weight and any(part is trainable.module for _, part in parts):
            # a compiled graph would hide what the loss is a mean over (`raytrain.train.mean_weight`)
            for function in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
                torch._dynamo.disallow_in_graph(function)
        mode = "default" if job.loop.compile == "auto" else job.loop.compile
        graphs = on_gpu and mode == "reduce-overhead"
        self.compiled = CompiledParts(parts, mode=mode, static=self._fixed, graphs=graphs)

    def forget_graphs(self) -> None:
        """See `CompiledParts.forget_graphs`."""
        if self.compiled is not None:
            self.compiled.forget_graphs()

    def compare_kernels(self, device: torch.device, policy: PrecisionPolicy) -> None:
        """Have the modules that can choose between kernels compare them, before anything is measured."""
        for part in self._comparing:
            part.compare_kernels(device, policy.autocast_dtype or policy.master_dtype)

    def observe(self, batch: dict[str, Any]) -> None:
        """Register a batch before the training step uses it."""
        off = self.cudnn.observe(batch)
        if off is not None:
            self._notices.append(("decision", {"what": "cudnn_benchmark", **off}))

    def compile_seconds(self) -> float:
        """Seconds spent in the compiler since the last call."""
        return 0.0 if self.compiled is None else self.compiled.take_seconds()

    def notices(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events (kind, fields) since the last call."""
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

    def stay_eager(self) -> None:
        """Switch compilation off, as if it had not been tried."""
        self.end()
        self.compiled = None


def _fixed_shapes(source: Source) -> bool:
    """Whether all rows have the same shape, so that batches differ in their number of rows only."""
    for split in (source.train, source.eval):
        while isinstance(split, SplitView):
            split = split.split
        if split is not None and split.tokens_per_row is None and not isinstance(split, TensorSplit):
            return False
    return True
