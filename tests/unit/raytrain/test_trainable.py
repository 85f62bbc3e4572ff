"""A stranger's module becomes a Trainable, or an error that says what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.errors import InputError
from raytrain.trainable import LossOutput, Trainable, accuracy, in_eval, labels_weight, loss_output, rows


class Classifier(nn.Module):
    """As a person who never saw this project writes one: the transformers convention."""

    def __init__(self, features: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.inner = nn.Linear(features, classes)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inner(x)
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = F.cross_entropy(logits, labels)
        return out


class ScalarLoss(Classifier):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(self.inner(x), labels)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class ObjectOutput(Classifier):
    def forward(self, x: Tensor, labels: Tensor, **more: Any) -> Output:  # type: ignore[override]
        logits = self.inner(x)
        return Output(F.cross_entropy(logits, labels), logits)


class Counting(Classifier):
    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: int | None = None) -> Tensor:  # type: ignore[override]
        if num_items_in_batch is None:
            return F.cross_entropy(self.inner(x), labels)
        return F.cross_entropy(self.inner(x), labels, reduction="sum") / num_items_in_batch


def batch(n: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (n,), generator=generator)
    return {"x": torch.randn(n, 4, generator=generator), "labels": labels}


@pytest.mark.parametrize("kind", [Classifier, ScalarLoss, ObjectOutput])
def test_three_shapes_of_the_convention_give_the_same_loss(kind: type[Classifier]) -> None:
    torch.manual_seed(0)
    made = Trainable.from_module(kind())
    out = made.loss(made.module, batch())
    expected = F.cross_entropy(made.module.inner(batch()["x"]), batch()["labels"])
    assert torch.equal(out.loss, expected)
    assert out.aux is None and out.metrics == {} and not made.takes_global_count
    out.loss.backward()
    assert made.module.inner.weight.grad is not None


def test_accuracy_is_computed_in_evaluation_where_logits_and_labels_match() -> None:
    made = Trainable.from_module(Classifier())
    made.module.eval()
    data = batch()
    out = made.loss(made.module, data)
    hits = (made.module.inner(data["x"]).argmax(1) == data["labels"]).double().mean()
    assert torch.equal(out.metrics["accuracy"], hits)
    scalar = Trainable.from_module(ScalarLoss().eval())
    assert scalar.loss(scalar.module, data).metrics == {}


def test_an_accuracy_per_token_is_not_guessed_but_a_named_one_is_used() -> None:
    logits, labels = torch.zeros(2, 5, 3), torch.zeros(2, 5, dtype=torch.int64)
    result = {"loss": torch.ones(()), "logits": logits}
    assert loss_output(result, labels=labels, training=False).metrics == {}
    named = loss_output(result | {"accuracy": torch.tensor(0.25)}, labels=labels, training=False)
    assert named.metrics["accuracy"].item() == 0.25


def test_accuracy_excludes_ignored_labels() -> None:
    logits = torch.eye(3).repeat(2, 1)
    labels = torch.tensor([0, 1, 0, -100, -100, 2])
    assert accuracy(logits, labels).item() == 0.75
    assert accuracy(logits, torch.full((6,), -100)).item() == 0.0


def test_the_global_count_is_passed_to_a_forward_with_that_parameter() -> None:
    torch.manual_seed(0)
    made = Trainable.from_module(Counting())
    assert made.takes_global_count
    data = batch()
    halves = [{name: value[part] for name, value in data.items()} for part in (slice(0, 2), slice(2, 6))]
    total = sum(made.loss(made.module, half, num_items_in_batch=6).loss for half in halves)
    assert torch.allclose(total, made.loss(made.module, data).loss, atol=1e-6)
    assert not Trainable.from_module(ObjectOutput()).takes_global_count  # **more alone is no promise


def test_an_own_loss_may_return_a_scalar_a_pair_or_a_loss_output() -> None:
    module, data = nn.Linear(4, 1), batch()

    def scalar(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return module(batch["x"]).square().mean()

    def pair(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = scalar(module, batch)
        return loss, {"root": loss.sqrt()}

    def full(module: nn.Module, batch: dict[str, Tensor]) -> LossOutput:
        return LossOutput(scalar(module, batch), aux=torch.ones(()))

    found = [Trainable.from_module(module, loss=fn).loss(module, data) for fn in (scalar, pair, full)]
    assert found[0].loss == found[1].loss == found[2].loss
    assert not found[1].metrics["root"].requires_grad
    assert found[2].aux is not None


def test_a_custom_loss_may_use_the_global_count() -> None:
    def summed(module: nn.Module, batch: dict[str, Tensor], num_items_in_batch: int) -> Tensor:
        return module(batch["x"]).sum() / num_items_in_batch

    module = nn.Linear(4, 1)
    made = Trainable.from_module(module, loss=summed)
    assert made.takes_global_count
    assert made.loss(module, batch(), num_items_in_batch=3).loss == module(batch()["x"]).sum() / 3


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        (torch.zeros(6), r"a torch.float32 tensor of shape \(6,\)"),
        (torch.zeros((), dtype=torch.int64), "a torch.int64 tensor"),
        ({"logits": torch.zeros(6, 3)}, r"a dict with the keys \['logits'\] that holds no loss"),
        (Output(None, torch.zeros(6, 3)), "a Output that holds no loss"),  # type: ignore[arg-type]
        ({"loss": 0.5}, "float as the loss"),
        (None, "NoneType"),
    ],
)
def test_a_result_without_a_scalar_loss_is_an_input_error(result: Any, seen: str) -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return result

    made = Trainable.from_module(Wrong())
    with pytest.raises(InputError, match=seen) as caught:
        made.loss(made.module, batch())
    assert caught.value.key == "model.builder"


def test_batch_keys_that_do_not_fit_forward_are_named() -> None:
    made = Trainable.from_module(Classifier())
    with pytest.raises(InputError, match=r"data\.source: got the batch keys \['pixels'\]") as caught:
        made.loss(made.module, {"pixels": torch.zeros(2, 4), "labels": torch.zeros(2)})
    assert "no batch keys ['x'] that Classifier.forward needs" in str(caught.value)
    assert "among ['labels', 'x']" in str(caught.value)
    open_ended = Trainable.from_module(ObjectOutput())
    assert open_ended.loss(open_ended.module, batch() | {"note": torch.zeros(6)}).loss.isfinite()


def test_a_forward_that_takes_no_column_is_told_which_ones_to_take() -> None:
    class Nothing(nn.Module):
        def forward(self) -> Tensor:
            return torch.zeros(())

    found = []
    for module in (Nothing(), nn.Linear(4, 3)):
        made = Trainable.from_module(module)
        with pytest.raises(InputError) as caught:
            made.loss(made.module, batch())
        found.append(caught.value)
    assert [error.key for error in found] == ["model.builder", "data.source"]
    assert all("write def forward(self, x, labels) that returns the loss, or pass" in error.remedy for error in found)
    assert all("rename" not in error.remedy and "[]" not in str(error) for error in found)


def test_an_object_that_is_not_a_module_is_refused() -> None:
    with pytest.raises(InputError, match=r"model\.builder: got a dict, expected a torch\.nn\.Module"):
        Trainable.from_module({})  # type: ignore[arg-type]


def test_weight_counts_labels_or_rows() -> None:
    tokens = {"input_ids": torch.zeros(2, 3), "labels": torch.tensor([[1, -100, 2], [-100, -100, 3]])}
    assert labels_weight(tokens) == 3
    assert labels_weight({"x": torch.zeros(5, 2), "labels": torch.zeros(5)}) == 5
    assert labels_weight({"name": ["a"], "x": torch.zeros(7)}) == 7
    with pytest.raises(InputError, match="without a tensor"):
        rows({"name": ["a"]})


def test_a_part_that_is_kept_in_eval_mode_is_in_it_after_an_evaluation_too() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5)))
    module[1].eval()
    with in_eval(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == [True, True, False, False]
