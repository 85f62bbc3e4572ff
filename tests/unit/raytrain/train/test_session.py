"""One attempt in a plain process: what it is built from, what it gives to a checkpoint and takes out of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab import GPT, MLP, Rows, class_rows, digest, make_session, optimizer_state, token_rows, train
from torch import nn

from raytrain.checkpoint.reader import load
from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.errors import CheckpointError
from raytrain.plan.plan import Plan
from raytrain.plan.shares import Shares
from raytrain.runs.folder import RunFolder
from raytrain.train import session as module
from raytrain.train.device import set_determinism
from raytrain.train.session import Session
from raytrain.trainable import LossOutput, Trainable

DATA = {"train": class_rows(64), "eval_fraction": 0.0}


def test_the_sessions_numbers_are_the_plans() -> None:
    session = make_session(
        MLP,
        {"train": class_rows(64), "eval": class_rows(8)},
        loop={"max_steps": 11, "eval_every": 3, "log_every": 4, "eval_batches": 2, "patience": 5, "min_delta": 0.1},
        optim={"lr": 0.5, "scale_lr": "linear", "warmup_steps": 3, "max_grad_norm": 0.7},
        retry={"nonfinite_steps": 2},
    )
    limits = session.limits()
    assert (limits.max_steps, limits.log_every, limits.eval_every) == (11, 4, 3)
    assert (limits.patience, limits.min_delta, limits.nonfinite_steps) == (5, 0.1, 2)
    schedule = session.step.schedule
    assert (schedule.peak, schedule.warmup_steps, schedule.max_steps) == (0.25, 3, 11)
    assert session.step.max_grad_norm == 0.7 and session.optimizers[0].param_groups[0]["lr"] == 0.25
    assert session.peak_memory() > 2**20


@pytest.mark.parametrize(("workers", "shared", "sharing"), [(1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 3, 3)])
def test_processes_on_one_gpu_divide_its_memory_also_with_expert_hosts(
    monkeypatch: pytest.MonkeyPatch, workers: int, shared: int, sharing: int
) -> None:
    """A worker sees the other workers; of hosts only the plan knows."""
    limited: list[int] = []
    monkeypatch.setattr(module, "processes_sharing", lambda _device, _workers: workers)
    monkeypatch.setattr(module, "limit_device_memory", lambda _device, **limits: limited.append(limits["processes"]))
    monkeypatch.setattr(Plan, "per_gpu", shared)
    assert [make_session(MLP, DATA).sharing] == limited == [sharing]


@pytest.mark.parametrize(("threads", "deterministic"), [(1, True), (2, False)])
def test_the_planned_threads_and_determinism_are_those_of_the_process(threads: int, deterministic: bool) -> None:
    before = torch.get_num_threads()
    try:
        make_session(MLP, DATA, scale={"threads": threads}, loop={"deterministic": deterministic})
        assert torch.get_num_threads() == threads
        assert torch.are_deterministic_algorithms_enabled() is deterministic
    finally:
        torch.set_num_threads(before)
        set_determinism(deterministic=False)


def test_settings_that_are_measured_later_reach_the_step_the_loader_and_the_layers() -> None:
    session = make_session(MLP, DATA, precision="bf16")
    shares = Shares(micro_batch=4, rows=(4,), pass_s=(1.0,))
    measured = replace(session.settings, micro_batch=4, shares=shares, inflight=2, fp32_layers=("layers.1",))
    session.use(measured)
    assert (session.loader.batches.micro_batch, session.step.inflight, session.settings) == (4, 2, measured)
    assert session.loader.batches.shares is shares
    layers = session.trainable.module.get_submodule("layers")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        formats = [layer(torch.ones(1, layer.in_features)).dtype for layer in layers.children()]
    assert formats == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_the_eval_loop_is_off_without_an_eval_split() -> None:
    session = make_session(MLP, DATA, loop={"max_steps": 2})
    rows, outcome = train(session)
    assert session.source.eval is None and rows.of("eval", "loss") == [] and outcome.kind == "done"


def test_the_seed_fixes_the_weights_and_another_gives_others() -> None:
    first = digest(make_session(GPT, {"train": token_rows(32)}, seed=3).trainable.module.state_dict())
    assert digest(make_session(GPT, {"train": token_rows(32)}, seed=3).trainable.module.state_dict()) == first
    assert digest(make_session(GPT, {"train": token_rows(32)}, seed=4).trainable.module.state_dict()) != first


class Counter:
    """A further part of a checkpoint."""

    def __init__(self) -> None:
        self.count = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "unit": "steps"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["unit"] == "steps"
        self.count.copy_(state["count"])


def own(counter: Counter) -> Trainable:
    """A model of somebody's with two optimizers and a part of its own."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))

    def make(module: nn.Sequential, optim: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(module[0].parameters(), lr=optim.lr, momentum=0.9),
                torch.optim.AdamW(module[2].parameters(), lr=optim.lr)]  # fmt: skip

    def count(step: int) -> None:
        counter.count += step

    return Trainable(
        module,
        lambda m, batch: LossOutput(nn.functional.cross_entropy(m(batch["x"]), batch["labels"])),
        optimizers=make,
        state_parts=lambda: {"counter": counter},
        between_steps=count,
    )


def saved(session: Session, folder: Path) -> Any:
    """The session's checkpoint, written and read again."""
    run = RunFolder(str(folder))
    with CheckpointWriter(run, keep="all", asynchronous=False) as writer:
        state = {"loop": session.state.to_json(), "world_size": 1, "precision": session.precision, "seed": 0}
        parts = {**session.parts(), "rng": {"0": session.generator_state()}}
        writer.save(parts, state, step=session.state.step)
    return load(run.checkpoint_dir(session.state.step))


def test_a_users_optimizers_and_parts_come_back(tmp_path: Path) -> None:
    counters = Counter(), Counter()
    first = make_session({"module": own(counters[0])}, DATA, loop={"max_steps": 8})
    first.loop(reporter=Rows(), should_stop=lambda: first.state.step == 4).run(first.state)
    loaded = saved(first, tmp_path)
    assert {"model", "optimizer", "part_counter", "rng"} == set(loaded.parts)
    second = make_session({"module": own(counters[1])}, DATA, loop={"max_steps": 8})
    second.restore(loaded)
    assert float(counters[1].count) == 1 + 2 + 3 + 4 and second.state == first.state
    assert digest(optimizer_state(second)) == digest(optimizer_state(first))
    rest = [train(session)[0].losses for session in (first, second)]
    assert rest[0] == rest[1] and len(rest[0]) == 4 and float(counters[1].count) == 36


def test_a_checkpoint_of_another_model_is_refused_with_names_and_shapes(tmp_path: Path) -> None:
    loaded = saved(make_session(MLP, DATA), tmp_path)
    wider = make_session({**MLP, "hidden": [48, 32]}, DATA)
    with pytest.raises(CheckpointError, match=r"layers\.0\.weight has shape \(32, 12\), the model \(48, 12\)"):
        wider.restore(loaded)
    deeper = make_session({**MLP, "hidden": [32, 32, 32]}, DATA)
    with pytest.raises(CheckpointError, match=r"layers\.3\.weight is missing"):
        deeper.restore(loaded)
    flatter = make_session({**MLP, "hidden": [32]}, DATA)
    with pytest.raises(CheckpointError, match=r"layers\.2\.weight is not in the model"):
        flatter.restore(loaded)


def test_tied_weights_are_tied_after_a_restore(tmp_path: Path) -> None:
    rows = {"train": token_rows(32), "eval_fraction": 0.0}
    first = make_session(GPT, rows, loop={"max_steps": 4})
    train(first)
    second = make_session(GPT, rows, loop={"max_steps": 6}, seed=9)
    second.restore(saved(first, tmp_path))
    module = second.trainable.module
    assert module.head.weight is module.tokens.weight
    assert digest(module.state_dict()) == digest(first.trainable.module.state_dict())
    train(second)
    assert torch.equal(module.head.weight, module.tokens.weight) and second.state.step == 6


def test_a_scale_of_a_run_that_fell_back_is_not_needed(tmp_path: Path) -> None:
    """fp16's checkpoint into a float32 session, and the other way round."""
    half = make_session(MLP, DATA, precision="fp16")
    train(half)
    full = make_session(MLP, DATA, precision="fp32", loop={"max_steps": 22})
    full.restore(saved(half, tmp_path / "half"))
    train(full)
    again = make_session(MLP, DATA, precision="fp16", loop={"max_steps": 24})
    again.restore(saved(full, tmp_path / "full"))
    assert float(again.step.scale.value) == 2.0**16
    assert train(again)[1].kind == "done"


def test_the_workers_of_another_world_size_draw_different_numbers(tmp_path: Path) -> None:
    """As dropout does; the generators of the checkpoint belong to ranks that no longer exist."""
    first = make_session(MLP, DATA, loop={"max_steps": 4})
    train(first)
    loaded = saved(first, tmp_path)
    drawn = []
    for rank in (0, 1, 1):
        session = make_session(MLP, DATA, loop={"max_steps": 8})
        session.workers.rank, session.workers.world_size = rank, 2
        session.restore(loaded)
        drawn.append(digest(session.generator_state()))
    assert drawn[0] != drawn[1] == drawn[2]
