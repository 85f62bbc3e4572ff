"""A new run from weights: whether they fit, and that only the weights are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lab import GPT, MOE, make_session, token_rows, train
from safetensors.torch import load_file, save_file
from torch import nn

from jobs.driver.check_job import check_on_driver
from jobs.job.facts import resolved
from jobs.job.spec import load_spec
from raytrain.config.sections import ModelConfig
from raytrain.errors import InputError
from raytrain.models.weights.stored import StartingWeights, export_weights
from raytrain.train.job import build_trainable
from raytrain.trainable import Trainable

DATA = {"train": token_rows(32)}


def weights_of(session: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in session.trainable.module.state_dict().items()}


@pytest.mark.parametrize("model", [GPT, MOE])
def test_a_session_starts_from_weights_and_nothing_else(tmp_path: Path, model: dict[str, Any]) -> None:
    """The other run's optimizer and position stay behind; bf16 weights are cast to the master format."""
    other = make_session(model, DATA, seed=3)
    train(other)
    path = str(tmp_path / "model.safetensors")
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in weights_of(other).items()}
    halves["head.weight"] = halves["tokens.weight"]
    export_weights(halves, path)
    session = make_session({**model, "init_from": path}, DATA)
    found = weights_of(session)
    assert all(torch.equal(found[name], halves[name].float()) for name in halves)
    assert found["head.weight"].dtype == torch.float32 and session.trainable.module.head.weight is (
        session.trainable.module.tokens.weight
    )
    assert session.state.step == 0 and not session.optimizers[0].state
    unlike = make_session(model, DATA)
    assert not torch.equal(weights_of(unlike)["tokens.weight"], found["tokens.weight"])


def test_fp64_is_restored_to_the_last_bit(tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    module = nn.Linear(2, 2).double()
    export_weights(module.state_dict(), path)
    taken = nn.Linear(2, 2).double()
    StartingWeights(path).fill(taken)
    assert torch.equal(taken.weight, module.weight)


def test_mismatched_tensors_are_one_message_with_counts_and_the_first_five(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    state = {f"layer{i}.weight": torch.zeros(2) for i in range(7)}
    save_file({**state, "0.weight": torch.zeros(3, 3)}, path)
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(InputError) as error:
        StartingWeights(str(path)).check(module)
    assert str(error.value) == (
        f"model.init_from: got {path}: 3 missing (0.bias, 1.weight, 1.bias); "
        "7 unexpected (layer0.weight, layer1.weight, layer2.weight, layer3.weight, layer4.weight and 2 more); "
        "1 misshapen (0.weight [3, 3] for [2, 2]), expected the names and shapes of this model; "
        "the weights belong to another model or to other sizes"
    )


@pytest.mark.parametrize("width", [32, 16])
def test_the_driver_finds_it_before_anything_starts(tmp_path: Path, width: int) -> None:
    """On the meta device, where tied weights have no address to be known by."""
    path = str(tmp_path / "model.safetensors")
    export_weights(weights_of(make_session(GPT, DATA)), path)
    mapping = {"model": {**GPT, "width": width, "init_from": path}, "data": DATA}
    spec = resolved(load_spec(mapping=mapping).spec)
    if width == 32:
        assert check_on_driver(spec).model_facts.parameters > 0
        return
    with pytest.raises(InputError, match=r"init_from: .* misshapen \(positions \[12, 32\] for \[12, 16\]"):
        check_on_driver(spec)


def test_a_file_with_a_tied_weight_under_its_second_name_fits(tmp_path: Path) -> None:
    session = make_session(GPT, DATA, seed=3)
    path = tmp_path / "model.safetensors"
    export_weights(weights_of(session), str(path))
    state = load_file(path)
    state["head.weight"] = state.pop("tokens.weight")
    save_file(state, path)
    taken = make_session({**GPT, "init_from": str(path)}, DATA)
    assert torch.equal(weights_of(taken)["tokens.weight"], state["head.weight"])


def test_parts_that_other_processes_take_are_filled_before_they_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As experts are handed to their hosts once the builder has returned; what is left is not compared again."""
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    path = str(tmp_path / "model.safetensors")
    export_weights(whole.state_dict(), path)
    taken: list[torch.Tensor] = []

    def take(trainable: Trainable) -> None:
        taken.append(trainable.module[1].weight.detach().clone())
        del trainable.module[1]

    def build() -> Trainable:
        made = Trainable.from_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        made.hand_over = take
        return made

    monkeypatch.setattr("raytrain.train.job.resolve", lambda *_, **__: build)
    model = ModelConfig(builder="my:build", init_from=path)
    left = build_trainable(model, sections={}, facts={}).module
    assert torch.equal(taken[0], whole[1].weight) and torch.equal(left.state_dict()["0.weight"], whole[0].weight)
    unlike = build_trainable(model, sections={}, facts={}, initial=False).module
    assert not torch.equal(unlike.state_dict()["0.weight"], whole[0].weight)
