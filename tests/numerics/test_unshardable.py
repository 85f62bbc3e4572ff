"""What shards could get wrong without a word: it is right, or named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import unshardable
from gang import run_gang
from sharded import close

RECOMPUTED = {"loop": {"activation_checkpointing": True}}


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("swapped", "rank 0 gathers layers.1 where rank 1 gathers layers.2"),
        ("short", "rank 0 gathers layers.3 where rank 1"),
        ("in evaluation", "rank 0 gathers layers.3 where rank 1 ends the pass"),
    ],
)
def test_another_order_of_blocks_is_named_on_every_worker_before_anything_is_committed(kind: str, seen: str) -> None:
    for error, words, steps in run_gang(unshardable.failed, kind, 60.0, world_size=2):
        assert error == "RunError" and steps == (2 if kind == "in evaluation" else 0)
        assert words.startswith("scale.strategy: fsdp needs one order of blocks on all workers") and seen in words


def test_a_worker_that_leaves_the_known_order_alone_names_it_within_its_patience() -> None:
    first, second = run_gang(unshardable.failed, "later", 1.0, world_size=2)
    assert second[0] == "RunError" and second[2] == first[2] == 2
    assert "rank 1 gathers layers.2 where it gathers layers.1 in other passes" in second[1]
    assert "did not answer for 1 s" in second[1]
    assert first[0] == "CollectiveFailed", "a consequence"


@pytest.mark.parametrize(("kind", "sections"), [("drawn", {}), ("twice", RECOMPUTED)], ids=["drawn", "twice"])
def test_any_order_that_all_workers_share_trains_as_data_parallel_does(kind: str, sections: dict[str, Any]) -> None:
    builder, evaluated = (
        f"ordered {kind}",
        {"evaluate": 7, **sections, "optim": {"weight_decay": 0.0, "momentum": 0.0}},
    )
    one = run_gang(unshardable.trained, builder, "data_parallel", evaluated, world_size=2)[0]
    ranks = run_gang(unshardable.trained, builder, "fsdp", evaluated, world_size=3)
    assert len(one["evals"]) == 3 and close(one, ranks[0]) < 1e-12
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)


def test_an_order_that_is_known_is_not_compared_again() -> None:
    found = [run_gang(unshardable.exchanges, kind, world_size=2) for kind in ("steady", "drawn")]
    for steady, drawn in zip(*found, strict=True):
        assert steady[0] > 10 and set(steady) == {steady[0]}
        assert drawn[-1] > drawn[0] > 5


@pytest.mark.parametrize(("world_size", "sections"), [(1, {}), (3, RECOMPUTED)])
def test_hooks_and_attributes_of_parameters_work_as_in_data_parallel(world_size: int, sections: dict[str, Any]) -> None:
    one = run_gang(unshardable.trained, "attached", "data_parallel", sections, world_size=2)[0]
    other = run_gang(unshardable.trained, "attached", "fsdp", sections, world_size=world_size)[0]
    assert close(one, other) < 1e-12


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_parameters_without_a_gradient_stay_as_in_a_plain_loop(name: str) -> None:
    """Weight decay and momentum leave alone what no worker used; what one worker used has the mean of all."""
    optim = {"name": name, **({} if name == "sgd" else {"lr": 0.01})}
    losses, weights = plain(name)
    for world_size in (1, 3):
        ranks = run_gang(unshardable.trained, "sometimes", "fsdp", {"optim": optim}, world_size=world_size)
        assert max(abs(a - b) for a, b in zip(losses, ranks[0]["losses"], strict=True)) < 1e-12
        gaps = {key: float(abs(value - ranks[0]["weights"][key]).max()) for key, value in weights.items()}
        assert max(gaps.values()) < 1e-12, gaps


def test_a_pass_without_rows_uses_nothing() -> None:
    """Of three rows in micro-batches of one, the second worker has one: it joins the other pass with a row of its own,
    which uses what the three rows do not."""
    few = {"loop": {"global_batch_size": 3, "micro_batch_size": 1}}
    one, other = (run_gang(unshardable.trained, "sometimes", "fsdp", few, world_size=n)[0] for n in (1, 2))
    assert close(one, other) < 1e-12


def plain(name: str) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(42)
    net = unshardable.Sometimes().double()
    batch = {key: value.double() for key, value in unshardable.rows().items()}
    groups = [
        {"params": [one for one in net.parameters() if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in net.parameters() if one.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer: Any = (
        torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        if name == "sgd"
        else torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99))
    )
    losses = []
    for step in range(unshardable.STEPS):
        net.step = step
        optimizer.zero_grad()
        loss = net(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: value.numpy() for key, value in net.state_dict().items()}


def test_the_driver_refuses_a_model_that_is_another_in_shards() -> None:
    words = {
        "same": "", "random": "", "loss": "than without: the loss", "state": "seen after the pass",
        "fails": "no shards here", "ends": "its process ended in the first pass",
        "gradient": "the gradient of layers.0.norm.weight",
    }  # fmt: skip
    (found,) = run_gang(unshardable.checked, list(words), "fp32", world_size=1)
    for (kind, seen), (key, said) in zip(words.items(), found, strict=True):
        assert key == ("scale.strategy" if seen else "") and seen in said, (kind, said)
    for precision in ("bf16", "fp64"):
        assert run_gang(unshardable.checked, ["same"], precision, world_size=1) == [[("", "")]]
