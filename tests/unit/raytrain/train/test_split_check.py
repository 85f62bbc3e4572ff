"""Whole and halves of a batch: what depends on the split is said, with its cause, and nothing else is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raytrain.train.split_check import split_changes
from raytrain.trainable import Trainable, labels_weight

ROWS = 8


class Head(nn.Module):
    """A small network with a mean loss over its rows."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.parts, self.last = nn.Linear(4, 6), nn.Sequential(*parts), nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.last(self.parts(torch.tanh(self.first(x)))), labels)}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class Contrastive(Head):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        z = F.normalize(logits, dim=1)
        return F.cross_entropy(5 * z @ z.T, torch.arange(len(z)))


class SumLoss(Head):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="sum")


class GlobalCount(Head):
    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: int = 1) -> dict[str, Tensor]:
        loss = F.cross_entropy(self.last(self.first(x)), labels, reduction="sum")
        return {"loss": loss / num_items_in_batch}


class Counting(Head):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return super().loss(logits, labels) * min(1.0, self.calls / 100)


class Ordinal(Head):
    """Depends on other rows only a little: by a penalty on the mean output, a tenth of its square."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + 0.1 * logits.mean(0).square().sum()


class Noisy(Contrastive):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits + 0.1 * torch.randn_like(logits), labels)


class Attending(Head):
    """Attention inside a row, which keeps its dropout rate as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
        self.drop_prob = 0.5

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.first(x)[:, None]
        h = F.dropout(self.attention(h, h, h)[0], self.drop_prob, self.training)
        return {"loss": self.loss(self.last(h[:, 0]), labels)}


class AttendingContrastive(Attending, Contrastive):
    """A loss between rows, behind dropout that would hide it."""


def rows(labels: Tensor | None = None) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    given = torch.randint(3, (ROWS,), generator=draw) if labels is None else labels
    return {"x": torch.randn(ROWS, 4, generator=draw), "labels": given}


def found(module: nn.Module, batch: dict[str, Any] | None = None, **more: Any) -> str | None:
    torch.manual_seed(0)
    trainable = Trainable.from_module(module.train())
    return split_changes(trainable, batch or rows(), rows=ROWS, weigh=labels_weight, **more)


SILENT = {
    "a mean": lambda: Head(nn.LayerNorm(6), nn.Dropout(0.5)),
    "the global count": GlobalCount,
    "dropout kept as a number": Attending,
    "a batch norm in eval mode": lambda: Head(nn.BatchNorm1d(6).eval()),
    "random numbers": Noisy,
    "deep": lambda: Head(*(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)) for _ in range(12))),
}


@pytest.mark.parametrize("name", SILENT)
def test_a_loss_that_is_a_mean_over_rows_is_not_mentioned(name: str) -> None:
    module = SILENT[name]()
    modes = {part: part.training for part in module.modules()}
    module.train()
    for part, training in modes.items():
        part.training = training
    trainable = Trainable.from_module(module)
    assert split_changes(trainable, rows(), rows=ROWS, weigh=labels_weight) is None


@pytest.mark.parametrize(
    ("module", "cause"),
    [
        (Contrastive, "what forward computes from several rows"),
        (Ordinal, "what forward computes from several rows"),
        (AttendingContrastive, "what forward computes from several rows"),
        (SumLoss, "looks like a sum over the rows"),
        (lambda: Head(nn.BatchNorm1d(6)), "(batch norms take their statistics from a micro-batch);"),
        (lambda: Contrastive(nn.BatchNorm1d(6)), "batch norms take their statistics from a micro-batch, and what"),
        (Counting, "forward depends on how often it was called"),
    ],
)
def test_a_loss_of_the_whole_batch_is_named_with_its_cause(module: Callable[[], nn.Module], cause: str) -> None:
    torch.manual_seed(4)
    text = found(module())
    assert text is not None and cause in text and "loop.micro_batch_size whole" in text


def test_the_losses_in_the_text_are_those_of_the_rows() -> None:
    module, batch = Contrastive(), rows()
    whole = module(**batch)["loss"].item()
    parts = [module(**{name: value[at] for name, value in batch.items()})["loss"].item()
             for at in (slice(0, 4), slice(4, 8))]  # fmt: skip
    text = found(module, batch)
    assert text is not None and f"{whole:.6g} is the loss" in text and f"{sum(parts) / 2:.6g} of their halves" in text


def test_halves_are_weighed_by_their_labels() -> None:
    labels = torch.tensor([0, -100, -100, -100, 1, 2, 0, 1])
    assert found(Head(), rows(labels)) is None
    trainable = Trainable.from_module(Head().train())
    assert split_changes(trainable, rows(labels), rows=ROWS, weigh=lambda batch, rows: rows) is not None


def test_synchronized_batch_norms_are_left_out() -> None:
    assert found(Head(nn.BatchNorm1d(6)), synchronized=True) is None
    text = found(Contrastive(nn.BatchNorm1d(6)), synchronized=True)
    assert text is not None and "batch norms" not in text


def test_weights_buffers_and_generators_are_put_back() -> None:
    module = Contrastive(nn.BatchNorm1d(6))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    trainable = Trainable.from_module(module.train())
    assert split_changes(trainable, rows(), rows=ROWS, weigh=labels_weight) is not None
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_nested_batches_are_cut_and_others_are_left_out() -> None:
    class Nested(Contrastive):
        def forward(self, given: dict[str, Any], labels: Tensor) -> dict[str, Tensor]:
            assert len(given["names"]) == len(labels)
            return super().forward(given["x"], labels)

    flat = rows()
    nested = {"given": {"x": flat["x"], "names": list("abcdefgh")}, "labels": flat["labels"]}
    assert found(Nested(), nested) is not None
    nested["given"]["edges"] = torch.zeros(2, 5)  # not of rows
    assert found(Nested(), nested) is None
