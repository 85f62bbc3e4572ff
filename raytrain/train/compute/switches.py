"""What makes a worker's steps faster or smaller, each by its own key; applied once, when a session is built."""

from __future__ import annotations

from typing import Any

import torch

from raytrain.models.attention import MaskCache
from raytrain.train.compute.activation_checkpointing import recompute
from raytrain.train.compute.compile import CompiledParts
from raytrain.train.compute.compile_parts import parts_to_compile
from raytrain.train.compute.cudnn import CudnnBenchmark
from raytrain.train.compute.toolchain import missing_for_compile
from raytrain.train.job import TrainJob
from raytrain.train.parallel.collectives import Workers
from raytrain.trainable import Trainable

MEGABYTE = 2**20


class Switches:
    """Compiled parts, blocks that backward computes again, cuDNN's search, the masks' budget.

    Args:
        job: its `loop` section and plan are obeyed.
        trainable: changed in place.
        workers: all of them compile, or none does.
    """

    def __init__(self, job: TrainJob, trainable: Trainable, *, device: torch.device, workers: Workers) -> None:
        loop, self._notices = job.loop, list[tuple[str, dict[str, Any]]]()
        self.cudnn = CudnnBenchmark(loop.cudnn_benchmark, device=device, deterministic=loop.deterministic)
        held = (part.__dict__.get("masks") for part in trainable.module.modules())
        self.masks = [cache for cache in held if isinstance(cache, MaskCache)]
        for cache in self.masks:
            cache.budget = int(loop.mask_cache_mb * MEGABYTE)
        self.compiled: CompiledParts | None = None
        if loop.compile != "off":
            self._compile(job, trainable, device=device, workers=workers)
        if loop.activation_checkpointing:  # around what is compiled: a compiled part is called again as it is
            recompute(trainable, every=int(loop.activation_checkpointing))

    def _compile(self, job: TrainJob, trainable: Trainable, *, device: torch.device, workers: Workers) -> None:
        planned = job.plan.compile
        why = planned.reason if planned is not None and planned.value_or(None) == "off" else None
        why = why or missing_for_compile(device.type)
        if sum(workers.all_reduce_ints([int(why is not None)])):
            why = why or "another worker's machine cannot compile"
            refused = {"requested": job.loop.compile, "achieved": "off", "reasons": [why], "seconds": 0.0, "parts": []}
            self._notices.append(("compile", refused))
            return
        self.compiled = CompiledParts(parts_to_compile(trainable, job.loop), mode=job.loop.compile)

    def saw(self, batch: dict[str, Any]) -> None:
        """A batch is about to be trained on."""
        off = self.cudnn.saw(batch)
        if off is not None:
            self._notices.append(("decision", {"what": "cudnn_benchmark", **off}))

    def compile_seconds(self) -> float:
        """Spent in the compiler since the last call."""
        return 0.0 if self.compiled is None else self.compiled.take_seconds()

    def notices(self) -> list[tuple[str, dict[str, Any]]]:
        """Events since the last call."""
        news, self._notices = self._notices, []
        compiled = None if self.compiled is None else self.compiled.news()
        return news if compiled is None else [*news, ("compile", compiled)]

    def metrics(self) -> dict[str, Any]:
        """For a logged row: what the mask caches hold and did, where there are some."""
        return {"mask_cache": MaskCache.total(self.masks)} if self.masks else {}

    def end(self) -> None:
        """Training with this session is over: whatever follows (an export, a sample of text) is not worth compiling
        for, and another session that takes the module over compiles it by itself."""
        if self.compiled is not None:
            self.compiled.off()
