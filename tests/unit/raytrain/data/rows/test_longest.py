from __future__ import annotations

import numpy as np
import torch

from raytrain.data.rows.map_style import LongestRow, longest_row
from raytrain.data.rows.residency import place_split
from raytrain.data.sources.in_memory import object_split
from raytrain.train.device import rng_state


class Items:
    """A map-style dataset that draws a random number for each item."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(self.lengths[index])}


def test_of_rows_of_different_lengths_the_longest_is_found() -> None:
    rows = {"input_ids": [[1, 2], [1, 2, 3, 4], [1]], "labels": np.array([0, 1, 0])}
    split = object_split(rows, key="data.train")
    assert longest_row(split) == LongestRow(1, 4)
    assert longest_row(place_split(split, "stream", "cpu")) == LongestRow(1, 4)


def test_rows_of_one_shape_have_none() -> None:
    assert longest_row(object_split({"x": torch.zeros(5, 3)}, key="data.train")) is None
    assert longest_row(object_split(Items([3] * 5), key="data.train")) is None


def test_items_of_a_dataset_are_inspected_without_random_draws() -> None:
    split = object_split(Items([2, 5, 9, 1]), key="data.train")
    before = rng_state(torch.device("cpu"))["torch"]
    assert longest_row(split) == LongestRow(2, 36)
    assert torch.equal(rng_state(torch.device("cpu"))["torch"], before)
