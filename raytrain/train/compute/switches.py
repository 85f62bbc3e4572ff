"""Applies the options that save time or memory in a worker's steps; once, when a session is built."""

from __future__ import annotations

from typing import Any

import torch

from raytrain.data.rows.contract import Source
from raytrain.data.rows.longest import longest_row
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
        on_gpu, sharded = device.type == "cuda", job.planned("strategy") == "fsdp"
        parts = parts_to_compile(trainable, job.loop, on_gpu=on_gpu, sharded=sharded)
        if trainable.reads_weight and any(part is trainable.module for _, part in parts):
            # a compiled graph would hide what the loss is a mean over (`raytrain.train.mean_weight`)
            for function in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
                torch._dynamo.disallow_in_graph(function)
        mode = "default" if job.loop.compile == "auto" else job.loop.compile
        splits = [split for split in (self._source.train, self._source.eval) if split is not None]
        varying = trainable.worst_case is not None or job.data.tokens_per_batch is not None
        varying = varying or any(getattr(split, "adds_mask", False) or longest_row(split) for split in splits)
        self.compiled = CompiledParts(parts, mode=mode, static=not varying, graphs=on_gpu and mode == "reduce-overhead")

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
