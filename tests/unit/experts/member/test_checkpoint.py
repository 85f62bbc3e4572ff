"""Experts in a checkpoint: of one step, and each in its place whatever the number of experts and hosts."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from experts.config import Key, LayerShape
from experts.member import checkpoint as module
from experts.member.checkpoint import ExpertFiles, await_files, snapshot
from experts.member.shard import CommitDecision, ExpertShard
from experts.placement.values import LayerPlacement, Placement
from raytrain.config.sections import OptimConfig
from raytrain.errors import RunError, StateLost
from raytrain.runs.folder import RunFolder

EXPERTS = 23
"""More than ten: numbers of two digits that begin like one of one digit, and the other way round in order of names."""
SHAPES = [LayerShape(16, (16,) * EXPERTS, "gelu"), LayerShape(16, (16,) * 3, "swiglu")]


def shard_of(host: int, *, hosts: int) -> ExpertShard:
    """Experts dealt to the hosts one by one; each has weights and a gradient of its own, and has made a step."""
    layers = (LayerPlacement(tuple((e % hosts,) for e in range(n)), ((1.0,),) * n) for n in (EXPERTS, 3))
    shard = ExpertShard(
        SHAPES, Placement(1, hosts, tuple(layers)), host, optim=OptimConfig(), dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    for layer, expert in shard.homes():
        for view in shard.weights_of((layer, expert)).values():
            view.fill_(100.0 * layer + expert)
    step(shard)
    return shard


def step(shard: ExpertShard) -> None:
    for layer, expert in shard.homes():
        for grad in shard.layers[layer].gradients_of(expert).values():
            grad.fill_(1.0 + layer + expert)
    shard.commit(CommitDecision(skip=False, coefficient=1.0, inverse_scale=1.0, lr=0.1))


def state(*shards: ExpertShard) -> dict[tuple[Key, str], torch.Tensor]:
    """Copies of everything that the hosts hold."""
    return {
        (key, name): value.clone()
        for shard in shards
        for key in shard.homes()
        for name, value in shard.state_of(key).items()
    }


def assert_same(left: dict[tuple[Key, str], torch.Tensor], right: dict[tuple[Key, str], torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_a_checkpoint_has_the_experts_of_its_step_although_training_goes_on(tmp_path: Path) -> None:
    """Written by two hosts while they make the next step, and read by three."""
    run, wrote = RunFolder(str(tmp_path)), [shard_of(host, hosts=2) for host in range(2)]
    before, files = state(*wrote), [ExpertFiles(run.path, host=host) for host in range(2)]
    snapshots = [snapshot(shard) for shard in wrote]
    for shard in wrote:
        step(shard)
    assert not torch.equal(state(*wrote)[(0, 1), "w1.exp_avg"], before[(0, 1), "w1.exp_avg"])
    for file, taken in zip(files, snapshots, strict=True):
        file.begin(taken, step=4)
    folder = run.checkpoint_dir(4)
    described = await_files(folder, 2, lost=lambda: None)
    assert sum(map(len, described["experts"].values())) == EXPERTS + 3
    Path(folder, "manifest.json").write_text(json.dumps({"experts": described["experts"]}))
    read = [shard_of(host, hosts=3) for host in range(3)]
    for host, shard in enumerate(read):
        step(shard)  # what it had is replaced
        ExpertFiles(run.path, host=host).load(shard, folder)
    assert_same(state(*read), before)


def test_a_checkpoint_whose_host_died_is_lost_state_and_one_that_takes_too_long_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first the run goes back to the checkpoint before; the second would repeat itself."""
    with pytest.raises(StateLost, match="step_4 was given up: expert host 1 died"):
        await_files(str(tmp_path / "step_4"), 2, lost=lambda: "expert host 1 died")
    monkeypatch.setattr(module, "WRITE_S", -1.0)
    with pytest.raises(RunError, match=r"step_4 was given up: expert hosts \[0, 1\] wrote nothing") as raised:
        await_files(str(tmp_path / "step_4"), 2, lost=lambda: None)
    assert not isinstance(raised.value, StateLost)


def test_a_write_begins_once_the_one_before_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next checkpoint may come while a slow disk still writes."""
    slow, began, shard = threading.Event(), list[str](), shard_of(0, hosts=2)
    write = module.write_tensors

    def slowly(file: Any, tensors: Any) -> Any:
        began.append(Path(file.name).parent.name)
        assert slow.wait(20)
        return write(file, tensors)

    monkeypatch.setattr(module, "write_tensors", slowly)
    files = ExpertFiles(str(tmp_path), host=0)
    files.begin(snapshot(shard), step=1)
    second = threading.Thread(target=files.begin, args=(snapshot(shard),), kwargs={"step": 2})
    second.start()
    second.join(0.1)
    assert second.is_alive() and began == ["step_00000001"]
    slow.set()
    second.join(20)
    files.wait()
    assert began == ["step_00000001", "step_00000002"]
