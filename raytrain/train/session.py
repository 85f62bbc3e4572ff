"""One attempt on one worker, without Ray: builds what the plan names, restores a checkpoint, creates the loop.

`raytrain.execution.worker` uses it inside a Ray Train worker, benchmarks and tests in a plain process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from raytrain.accelerator import device_name, empty_cache, gpu_module, on_gpu, worker_device
from raytrain.checkpoint.reader import LoadedCheckpoint
from raytrain.data.prepare import ReportEvent, prepare_source, verify_placement
from raytrain.data.rows.contract import Source
from raytrain.data.sources.open import open_source
from raytrain.plan.machines import peak_of
from raytrain.train.compile import Switches
from raytrain.train.device import need_data, rng_state, seed_everything, set_determinism, set_rng_state
from raytrain.train.job import StepSettings, TrainJob, build_of, restore_remote, source_facts
from raytrain.train.loader import BatchLoader, data_plan
from raytrain.train.loop import TrainingLoop
from raytrain.train.memory.device import limit_device_memory, memory_in_use, processes_sharing
from raytrain.train.memory.retry import MicroBatchSize
from raytrain.train.module_checks import check_module
from raytrain.train.optim import Schedule, build_optimizers, muons_blocks
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.strategy import Filler, ForStep, Replicated
from raytrain.train.parallel.sync_batchnorm import CollectiveReduction, Members, refuse_torchs_own, synchronize
from raytrain.train.placing import kept_in_eval
from raytrain.train.precision import LayerPrecision, LossScale, apply_matmul, policy_for
from raytrain.train.state import Clock, LoopLimits, LoopState, Reporter, Saver
from raytrain.train.step import TrainingStep, evaluate


class Session:
    """Everything one worker holds during one attempt.

    Args:
        local_rank: rank on this node, which selects the device index.
        source: opened data, if the caller already has it.
        initial: load `model.init_from`; False if a checkpoint will be restored.
        settings: what the steps use instead of the planned values.
    """

    def __init__(
        self, job: TrainJob, *, workers: Workers, local_rank: int = 0, source: Source | None = None,
        initial: bool = True, settings: StepSettings | None = None,
    ) -> None:  # fmt: skip
        self.job = job
        self.settings = settings or StepSettings.planned(job)
        self.workers = workers
        self.local_rank = local_rank
        self.device = worker_device(job.planned("device"), local_rank=local_rank)
        self.sharing = max(processes_sharing(self.device, workers), job.plan.per_gpu)
        """Number of processes on this device, expert hosts included (on a CPU: workers on this node)."""
        fraction, limit = job.cluster.memory_fraction, job.cluster.memory_limit
        limit_device_memory(self.device, fraction=fraction, limit=limit, processes=self.sharing)
        set_determinism(deterministic=job.loop.deterministic)
        threads = job.planned("threads")
        if threads:
            torch.set_num_threads(int(threads))
        seed_everything(job.seed)
        self.source = source or open_source(job.data, context=job.model.keys.get("context"), on_driver=False)
        self.facts = source_facts(self.source)
        self.trainable = build_of(job, facts=self.facts, initial=initial)
        check_module(self.trainable, key=job.model.origin, strategy=job.planned("strategy"))
        if self.trainable.remote.workers_group is not None:
            workers.use(self.trainable.remote.workers_group)
        self.switches = Switches(
            job, self.trainable, self.source, device=self.device, workers=workers, compiled=self.settings.compiled
        )
        self.layers = LayerPrecision(self.trainable.module, self.device)
        self.layers.keep(self.settings.fp32_layers)
        self.state = LoopState()
        self.precision: str | None = None  # until `prepare` has finished
        self.say: ReportEvent = lambda kind, **fields: None  # receives the events before the loop starts
        self.sizing: MicroBatchSize | None = None
        """Tracks the micro-batch size across out-of-memory errors. Created with the first loop; the next session of the
        attempt takes it over."""

    def prepare(self, precision: str) -> None:
        """Move the module to the device in `precision`'s master dtype; build optimizers, loader and step."""
        job, module = self.job, self.trainable.module
        self.policy = policy_for(precision)
        self.matmul = apply_matmul(self.policy)
        need_data(module)
        strategy: type[Replicated] = Replicated
        if job.planned("strategy") == "fsdp":
            from raytrain.train.parallel.fsdp import Sharded  # takes a second to import

            strategy = Sharded
        self.strategy = strategy(self.trainable, workers=self.workers, device=self.device)
        wanted = job.plan.value("sync_batchnorm", False)
        synced = synchronize(module, self.workers) if wanted else refuse_torchs_own(module, self.workers)
        self.strategy.place(self.policy, fp32_layers=self.settings.fp32_layers)
        verify_placement(module, self.device, name="")
        if names := kept_in_eval(module):
            why = "parts that their author put into eval mode stay in it, as do norms whose train() keeps them there"
            self.say("decision", what="eval_mode", value=names, reason=why)
        self.switches.compare_kernels(self.device, self.policy)
        lr = float(job.planned("lr"))
        optim = job.optim.model_copy(update={"lr": lr})
        make, blocks = self.trainable.optimizers, muons_blocks(self.trainable, optim)
        self.optimizers = make(module, optim) if make else build_optimizers(module, optim, lr=lr, blocks=blocks)
        if make:
            self.strategy.watch(self.optimizers)
        self.close()
        self.source = prepare_source(
            self.source, data_plan(self.job), device=self.device, device_name=device_name(self.device), report=self.say
        )
        own = {"workers": self.workers, "weight": self.trainable.weight, "dtype": self.policy.master_dtype}
        self.loader = BatchLoader.open(
            self.job, self.settings, self.source, device=self.device, whole=self.trainable.communicates, **own
        )
        schedule = Schedule(
            optim, lr=lr, warmup_steps=int(job.planned("warmup_steps")), max_steps=int(job.planned("max_steps"))
        )
        self.step = TrainingStep(
            self.trainable,
            optimizers=self.optimizers,
            policy=self.policy,
            scale=LossScale(self.device, enabled=self.policy.scales_loss),
            workers=self.workers,
            schedule=schedule,
            max_grad_norm=job.optim.max_grad_norm,
            device=self.device,
            inflight=self.settings.inflight,
            **self._for_step(synced),
        )
        self.step.reduction.overlap(self.settings.overlap)
        self.precision = precision
        if self.workers.rank:  # rank 0 keeps the job's seed, so a single worker draws what a plain loop would
            seed_everything(job.seed + self.workers.rank)

    def _for_step(self, synced: Members | None) -> ForStep:
        """Arguments of the step that depend on the strategy, and on whether passes contain collectives: of batch norms
        (`synced`), or of the model's own."""
        found = self.strategy.for_step(self.loader)
        if synced is None and not (self.trainable.communicates and self.workers.world_size > 1):
            return found
        own: ForStep = {"filler": Filler(self.loader), **found}  # under fsdp passes are collective anyway
        if "reduction" not in own:
            own["reduction"] = CollectiveReduction(self.trainable, workers=self.workers, device=self.device)
        if synced is not None:
            own["without_rows"] = synced.without_rows
            names = (name for name, _ in self.trainable.module.named_modules())
            synced.watch(own["reduction"].order, names)  # pyright: ignore[reportAttributeAccessIssue]
        return own

    def close(self) -> None:
        if hasattr(self, "loader"):
            self.loader.close()

    def release(self) -> None:
        """Free weights, gradients and optimizer state after `close`, even if something still refers to this session:
        the next one may need all of the memory. May be called twice."""
        if not hasattr(self, "step"):  # `prepare` has not finished
            return
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self.step.reduction.gradients.release()
        self.strategy.release()
        empty_cache(self.device)

    def use(self, settings: StepSettings) -> None:
        """Use these settings from now on; needs `prepare`. The next session after a rewind takes them over."""
        if settings.compiled != self.settings.compiled:
            self.layers.keep(())  # their precision is set outside the compiled parts
            self.switches.compile(settings.compiled)
        self.settings = settings
        self.layers.keep(settings.fp32_layers)
        if settings.micro_batch is not None:
            self.loader.batches.micro_batch = settings.micro_batch
        self.loader.batches.shares = settings.shares
        self.step.inflight = settings.inflight
        self.step.reduction.overlap(settings.overlap)

    def use_precision(self, precision: str) -> None:
        """Change the precision of the step's computation; weights and optimizer state keep their dtype."""
        self.precision = precision
        self.policy = self.step.policy = policy_for(precision)
        self.matmul = apply_matmul(self.policy)
        self.step.scale = LossScale(self.device, enabled=self.policy.scales_loss)

    # -- checkpoint -------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        """The state with tensors, by checkpoint part (see `raytrain.checkpoint.writer`)."""
        parts: dict[str, Any] = {
            "model": self.trainable.module.state_dict(),
            "optimizer": {str(index): optimizer.state_dict() for index, optimizer in enumerate(self.optimizers)},
        }
        if self.step.scale.enabled:
            parts["scaler"] = self.step.scale.state_dict()
        own = self.trainable.state_parts() if self.trainable.state_parts else {}
        return {**parts, **{f"part_{name}": part.state_dict() for name, part in own.items()}}

    def generator_state(self) -> dict[str, Any]:
        return rng_state(self.device)

    def restore(self, loaded: LoadedCheckpoint) -> None:
        """Restore weights, optimizer, loss scale, generators and position from a checkpoint; from one of another world
        size all but the generators, which are seeded from (seed, step, rank). Raises CheckpointError: it belongs to
        another model; the message lists the first five differences."""
        restore_remote(self.trainable, loaded)
        self.strategy.load(loaded.parts["model"])
        for index, optimizer in enumerate(self.optimizers):
            self.strategy.load_optimizer(optimizer, loaded.parts["optimizer"][str(index)])
        self.step.scale.load_state_dict(loaded.parts.get("scaler", {}))
        own = self.trainable.state_parts() if self.trainable.state_parts else {}
        for name, part in own.items():
            part.load_state_dict(loaded.parts[f"part_{name}"])
        self.state = LoopState.from_json(loaded.state["loop"])
        if loaded.state["world_size"] == self.workers.world_size:
            set_rng_state(loaded.parts["rng"][str(self.workers.rank)], self.device)
        else:
            seed_everything(self.job.seed + 1_000_003 * self.state.step + self.workers.rank)

    # -- the loop ---------------------------------------------------------------------------------

    def limits(self) -> LoopLimits:
        job, every = self.job, self.job.planned("eval_every")
        return LoopLimits(
            max_steps=int(job.planned("max_steps")),
            log_every=job.loop.log_every,
            eval_every=int(every) if every else None,
            patience=job.loop.patience,
            min_delta=job.loop.min_delta,
            nonfinite_steps=job.retry.nonfinite_steps,
            clear_every=job.loop.clear_every,
        )

    def loop(
        self,
        *,
        reporter: Reporter,
        should_stop: Callable[[], bool],
        saver: Saver | None = None,
        clock: Clock | None = None,
    ) -> TrainingLoop:
        """Create the loop over this session's step and loader; without a saver it never saves."""
        if self.sizing is None:
            loop = self.job.loop
            whole = loop.micro_batch_size == "whole"
            self.sizing = MicroBatchSize(self.loader.batches.micro_batch, grow_after=loop.grow_after, whole=whole)
        return TrainingLoop(
            step=self.step, loader=self.loader, evaluate=self.evaluate if self.source.eval is not None else None,
            limits=self.limits(), reporter=reporter, saver=saver or Saver(), should_stop=should_stop,
            peak_memory=self.peak_memory, memory=partial(memory_in_use, self.device), clock=clock or Clock(),
            sizing=self.sizing, switches=self.switches, full_rate=self.full_rate,
        )  # fmt: skip

    def evaluate(self, step: int) -> dict[str, Any]:
        """Loss and metrics over the eval split, the same on every worker."""
        split, limit = self.source.eval, self.job.loop.eval_batches
        assert split is not None, "a loop evaluates only with an eval split"
        batches, passes = self.loader.eval_batches(split, limit=limit), self.loader.eval_passes(split, limit=limit)
        clear = self.job.loop.eval_clear_every
        self.step.changes.before_lookups()
        values = evaluate(self.step, batches, workers=self.workers, passes=passes, clear_every=clear)
        self.step.changes.after_lookups()
        return values

    def full_module(self) -> nn.Module | None:
        """Return the module with all its weights on rank 0, at the end of training. Collective."""
        self.switches.end()
        return self.strategy.full_module(lambda: build_of(self.job, facts=self.facts, initial=False))

    def full_rate(self) -> float:
        """Samples per second of this worker's device (its share of it) at the data-sheet peak of the precision in use;
        0 where the peak or the FLOPs of a sample are unknown, or other processes compute a part of them."""
        planned, flops = self.job.plan.model_facts, self.trainable.flops_per_sample
        if flops is None and planned is not None:
            flops = planned.flops_per_sample
        peak = peak_of(device_name(self.device), str(self.precision))
        alone = self.job.plan.value("hosts", None) in ("none", 0, "colocated")
        return peak / flops / self.sharing if alone and peak and flops else 0.0

    def peak_memory(self) -> int:
        """Peak bytes of this worker since the last call: the device allocator's on a GPU, the process's resident set on
        a CPU (since the process started if the kernel cannot reset the peak)."""
        if on_gpu(self.device):
            peak = int(gpu_module(self.device).max_memory_allocated(self.device))
            gpu_module(self.device).reset_peak_memory_stats(self.device)
            return peak
        from cluster.telemetry.processes import process_memory, reset_peak

        peak = process_memory().peak
        reset_peak()
        return peak
