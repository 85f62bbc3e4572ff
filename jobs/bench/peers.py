"""Bench `peers`: the same model on the same text, trained by raytrain in a Ray worker, Lightning and Accelerate.

Each runs in a separate process; blocks alternate, and a waiting arm uses no CPU. The peers are an optional extra
(`pip install raytrain[peers]`); without it their claims are "not measurable here". Each is used as its documentation
shows, without extra work: no logger, no checkpoint, no progress bar. All use the model, the batches, the optimizer and
the learning rates of the plain loop.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from cluster.environment import package_version
from jobs.bench.harness.measuring import BenchMeasurement, Goal, equal_series, median_interval
from jobs.bench.harness.processes import Arms
from jobs.bench.harness.sessions import PlainLoop, write_text
from jobs.bench.loop import (
    LOG_EVERY,
    BlockObserver,
    StepOptions,
    TrainingBlocks,
    check_blocks,
    gpt_loop,
    language_loss,
    loop_job,
    start_run,
    start_script,
)

#: Step time of the faster peer over ours.
GOAL = Goal(at_least=1.0)
#: They compute the gradient norm in float32, we in float64; the losses of the first blocks differ by at most this.
TOLERANCE = 1e-3
#: Packages, and the functions below that their processes run.
PEERS = ("lightning", "accelerate")


def run(options: StepOptions, found: BenchMeasurement) -> None:
    check_blocks(options, workers=[1])
    found.block = f"seconds per step, the mean of {options.block_steps}"
    installed = [peer for peer in PEERS if importlib.util.find_spec(peer) is not None]
    if installed:
        _measure(options, found, installed)
    found.values["versions"] = {peer: package_version(peer) for peer in installed}
    missing = [peer for peer in PEERS if peer not in installed]
    if missing:
        effect = f"a step of ours takes no longer than one of {' or of '.join(missing)}"
        found.cannot(effect, "not installed: pip install raytrain[peers]")


def _measure(options: StepOptions, found: BenchMeasurement, peers: list[str]) -> None:
    found.say(f"starting ours, {' and '.join(peers)}")
    with Arms() as arms:
        text = write_text(arms.folder, options, steps=options.total_steps)
        ours = start_run(arms, "ours", loop_job(options, world_size=1, text=text, folder=arms.folder))
        asks = {"ours": ours.ask}
        for name in peers:
            asks[name] = start_script(arms, name, f"{__name__}:{name}", options, world_size=1, text=text).ask
        blocks = TrainingBlocks(arms, asks, options.block_steps)
        blocks.run(options.dropped)
        for name in peers:
            label = f"ours and {name} train the same steps"
            found.gate(equal_series(label, blocks.losses["ours"], blocks.losses[name], relative=TOLERANCE))
        if not found.passed:
            return
        found.say(f"{options.blocks} blocks of {len(asks)} arms")
        found.arms = blocks.run(options.blocks)
    for name in peers:
        found.compare(found.arms, of=name, to="ours", name=f"{name} / ours, a step")
    better = min(peers, key=lambda name: median_interval(found.arms[name]).median)
    label = f"the better of the peers ({better}) / ours, a step"
    found.compare(found.arms, of=better, to="ours", name=label, goal=GOAL)


# ---------------------------------------------------------------- the process of a peer


class StepObserver(BlockObserver):
    """Holds the loop of a peer between blocks, as our run is held; the loop names every step."""

    _step = 0

    def end_step(self, loss: Tensor) -> None:
        """Count a step, and read its loss where our run logs one: the end of a block is such a step."""
        self._step += 1
        if self._step == 1 or self._step % LOG_EVERY == 0:
            self.metrics({"step": self._step, "loss": loss.item()})


def _peer_loop(settings: dict[str, Any]) -> PlainLoop:
    """What a peer trains: the model, batches, optimizer and learning rates of the plain loop."""
    torch.set_num_threads(settings["threads"])
    return gpt_loop(settings, clip="torch", rank=0, world_size=1)


def accelerate(settings: dict[str, Any], _rank: int) -> None:
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    loop, observer = _peer_loop(settings), StepObserver()
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    schedule = LambdaLR(loop.optimizer, lambda done: loop.factor(done + 1))
    model, optimizer, scheduler = accelerator.prepare(loop.model, loop.optimizer, schedule)
    observer.begin()
    while not observer.over:
        optimizer.zero_grad()
        loss = language_loss(model, next(loop.batches))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        observer.end_step(loss.detach())


def lightning(settings: dict[str, Any], _rank: int) -> None:
    import lightning as L  # pyright: ignore[reportMissingImports]

    loop, observer = _peer_loop(settings), StepObserver()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = loop.model

        def training_step(self, batch: Any, _index: int) -> Tensor:
            return language_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            schedule = LambdaLR(loop.optimizer, lambda done: loop.factor(done + 1))
            return {"optimizer": loop.optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class EndSteps(L.Callback):
        def on_train_start(self, *_about: Any) -> None:
            observer.begin()

        def on_train_batch_end(self, trainer: Any, _module: Any, outputs: Any, *_about: Any) -> None:
            observer.end_step(outputs["loss"])
            trainer.should_stop = observer.over

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return loop.batches

    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=1.0, callbacks=[EndSteps()], min_steps=None, **off
    )
    trainer.fit(Module(), train_dataloaders=Batches())
