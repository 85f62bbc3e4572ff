"""What can be sharded, and what a sharded run says of it; one process, which holds all rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lab import GPT, MLP, class_rows, make_session, token_rows, train
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from raytrain.errors import CheckpointError, CollectiveFailed, InputError, OutOfMemory, RunError
from raytrain.train.module_checks import check_module
from raytrain.train.parallel import fsdp as wrap
from raytrain.train.parallel.collectives import Workers
from raytrain.train.precision import policy_for
from raytrain.train.session import Session
from raytrain.trainable import LossOutput, Trainable


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def session(rows: dict[str, Any] | None = None, **sections: Any) -> Session:
    scale = {"strategy": "fsdp", **sections.pop("scale", {})}
    return make_session(GPT, {"train": rows or token_rows(40)}, scale=scale, loop={"max_steps": 3}, **sections)


def refused(module: nn.Module, blocks: str) -> str:
    trainable = Trainable(module, lambda *_: LossOutput(torch.zeros(())), blocks=blocks)
    with pytest.raises(InputError) as caught:
        check_module(trainable, key="model.builder", strategy="fsdp")
    assert caught.value.key == "scale.strategy"
    return str(caught.value)


def stack() -> nn.Sequential:
    return nn.Sequential(nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), nn.Linear(3, 3, bias=False))


def test_weights_that_blocks_share_are_refused_by_name() -> None:
    module = stack()
    module[0][1].weight = module[0][0].weight  # pyright: ignore
    assert "0.0.weight" in refused(module, "0")
    module = stack()
    module[1].weight = module[0][2].weight  # pyright: ignore
    assert "0.2.weight" in refused(module, "0")


def test_scalars_are_refused_by_name() -> None:
    module = stack()
    module.temperature = nn.Parameter(torch.ones(()))
    assert "temperature" in refused(module, "0")


def collectives_of(monkeypatch: pytest.MonkeyPatch, *, overlap: bool) -> tuple[list[str], list[nn.Linear]]:
    """The order of the collectives and of the computation in one pass of three blocks over two workers, of which this
    process is one; torch's fake group does not communicate."""
    workers = Workers()  # before the group, as the fake one has no gloo group beside it
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    module = nn.Sequential(nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3)))
    module.forward = lambda x: module[0][2](module[0][1](module[0][0](x)))  # pyright: ignore
    order: list[str] = []
    real = wrap.TimedCollective.__call__

    def called(self: Any, *given: Any, **named: Any) -> Any:
        order.append("AllGather" if self.collective is wrap._gather else "ReduceScatter")
        return real(self, *given, **named)

    monkeypatch.setattr(wrap.TimedCollective, "__call__", called)
    monkeypatch.setattr(wrap, "on_gpu", lambda _: overlap)
    trainable = Trainable(module, lambda *_: LossOutput(torch.zeros(())), blocks="0")
    policy = policy_for("fp32")
    cpu = torch.device("cpu")
    wrap.shard(trainable, device=cpu, policy=policy, workers=workers, order=wrap.BlockOrder(workers, device=cpu))
    for _ in range(2):
        order.clear()
        module(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return order, list(module[0])  # pyright: ignore


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("overlap", [False, True])
def test_on_a_gpu_the_next_block_is_gathered_before_the_gradients_of_this_one_are_summed(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """On a CPU one block at a time is gathered; a GPU has torch's own order, which overlaps both with the passes."""
    order, blocks = collectives_of(monkeypatch, overlap=overlap)
    gather, scatter = "AllGather", "ReduceScatter"
    backward = order[-6:] if len(order) > 6 else order[3:]
    one_by_one = [gather, scatter] * 3
    assert (backward == one_by_one) == (not overlap), order
    if overlap:
        assert backward[:2] == [gather, gather], "the second block is on its way when the third computes"
    for block in blocks:
        state = block._get_fsdp_state()  # pyright: ignore
        (group,) = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        assert group.unshard_async_op == (not overlap)


def test_a_lost_worker_is_not_a_failure_of_the_pass() -> None:
    """Else recovery would take it for an operation that failed: after a few the run would stop, or leave bf16."""
    reduction = session().step.reduction

    def failing(error: Exception) -> Any:
        raise error

    gone = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:9")
    for error in (gone, dist.DistBackendError("NCCL communicator was aborted")):
        with pytest.raises(CollectiveFailed, match="inside a pass failed"):
            reduction.run_or_shortage(lambda error=error: failing(error))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        reduction.run_or_shortage(lambda: failing(RuntimeError("mat1 and mat2 shapes cannot be multiplied")))


def test_a_row_for_the_passes_of_others_weighs_something() -> None:
    rows = token_rows(40, ragged=True, empty=(0, 1, 2))
    made = session(rows)
    assert made.step.filler is not None
    before = torch.get_rng_state()
    batch = made.step.filler()
    assert bool((batch["labels"] != -100).any()) and made.step.filler() is batch
    zero = made.step.idle()
    assert float(zero.detach()) == 0.0 and made.trainable.module.training
    zero.backward()
    assert not any(buffer.any() for buffer in made.step.gradients.buffers)
    assert torch.equal(before, torch.get_rng_state()), "a worker without rows draws nothing"
    nothing = session(token_rows(40, empty=range(40)))
    assert nothing.step.filler is not None
    with pytest.raises(RunError, match="every label is -100"):
        nothing.step.filler()


def test_out_of_memory_in_a_pass_ends_the_attempt() -> None:
    made = session()

    def short(*_about: Any, **_named: Any) -> LossOutput:
        raise torch.OutOfMemoryError("planted")

    made.trainable.loss = short
    with pytest.raises(OutOfMemory, match="rank 0: OutOfMemoryError: planted"):
        train(made)


def test_a_gradient_that_is_not_finite_is_named_and_the_step_skipped() -> None:
    made = session()
    before = {name: value.to_local().clone() for name, value in made.trainable.module.state_dict().items()}
    up = made.trainable.module.get_submodule("blocks.1.feed_forward.up")
    up.register_forward_hook(lambda _module, _inputs, output: output.register_hook(lambda g: g * torch.inf) and None)
    rows, outcome = train(made)
    (event,) = [event for event in rows.events if event["kind"] == "nonfinite"][:1]
    assert "the gradients of positions, tokens.weight, blocks.0" in event["what"]
    assert made.step.reduction.nonfinite()[-1] == "blocks.1.feed_forward.up.weight", "the last that it reached"
    assert outcome.kind == "rollback" and rows.of("train", "skipped_steps") == [1, 2, 3]
    assert all(torch.equal(before[name], own.to_local()) for name, own in made.trainable.module.state_dict().items())


def test_a_checkpoint_of_another_model_is_refused_with_the_differences() -> None:
    made = session()
    state = {name: value.full_tensor() for name, value in made.trainable.module.state_dict().items()}
    made.strategy.load(state)
    state["norm.weight"] = torch.ones(5)
    del state["positions"]
    with pytest.raises(CheckpointError, match=r"positions is missing; norm.weight has shape \(5,\), the model \(32,\)"):
        made.strategy.load(state)


def test_a_module_given_in_python_is_sharded_as_a_copy_and_exported_in_full(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layers(x), labels)

    given = Net()
    made = make_session({"module": given}, {"train": class_rows(40)}, scale={"strategy": "fsdp"}, loop={"max_steps": 3})
    train(made)
    assert type(given) is Net and type(made.trainable.module) is not Net
    whole = made.full_module()
    assert whole is not None and type(whole) is Net
    trained = {name: value.full_tensor() for name, value in made.trainable.module.state_dict().items()}
    assert all(torch.equal(trained[name], value) for name, value in whole.state_dict().items())
    assert made.strategy.facts()["sharded"]["blocks"] == 2


def test_one_worker_trains_the_same_bits_as_without_shards() -> None:
    data = {"train": class_rows(40), "eval": class_rows(9, seed=3)}
    one, other = (
        make_session(MLP, data, scale={"strategy": strategy}, loop={"max_steps": 6}) for strategy in ("auto", "fsdp")
    )
    assert train(one)[0].losses == train(other)[0].losses
