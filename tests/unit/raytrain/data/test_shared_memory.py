"""A batch goes from process to process unchanged, whatever is in it, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from raytrain.data.prefetch import receive, send


@dataclass(frozen=True)
class Boxes:
    corners: Tensor
    note: str


def there_and_back(value: Any) -> Any:
    """Through another process, which hands on what it got and lives until its line is closed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def hand_on() -> None:
        ours.close()
        send(theirs, *receive(theirs))
        with contextlib.suppress(EOFError):
            theirs.recv()

    process = context.Process(target=hand_on, daemon=True)
    process.start()
    theirs.close()
    send(ours, "number 7", value)
    head, got = receive(ours)
    ours.close()
    process.join()
    assert head == "number 7" and process.exitcode == 0
    return got


def test_every_kind_of_tensor_and_of_nesting_arrives_as_it_was() -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    value = {
        "x": torch.arange(6.0).reshape(2, 3), "number": torch.tensor(3), "none": torch.empty(0, 4),
        "mask": torch.tensor([True, False]), "half": torch.randn(5).bfloat16(), "turned": torch.randn(4, 6).t(),
        "complex": torch.randn(3, dtype=torch.cfloat), "wide": torch.randn(2, 2).expand(3, 2, 2), "images": images,
        "parts": [Boxes(torch.ones(4), "a note"), (torch.zeros(1), None, "text")], "array": np.arange(5),
        "sequence": pack_sequence([torch.ones(3), torch.ones(2)]),
    }  # fmt: skip
    got = there_and_back(value)
    assert list(got) == list(value)
    for name, tensor in value.items():
        if isinstance(tensor, Tensor):
            assert torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype, name
    assert got["images"].is_contiguous(memory_format=torch.channels_last) and not got["images"].is_contiguous()
    boxes, (zero, none, text) = got["parts"]
    assert torch.equal(boxes.corners, torch.ones(4)) and boxes.note == "a note" and isinstance(got["parts"][1], tuple)
    assert torch.equal(zero, torch.zeros(1)) and (none, text) == (None, "text")
    assert got["array"].tolist() == [0, 1, 2, 3, 4]
    assert isinstance(got["sequence"], PackedSequence) and torch.equal(got["sequence"].data, torch.ones(5))
    x, other = got["x"]._version, got["complex"]._version
    got["x"].add_(1)
    assert got["x"].sum() == 21.0, "it may be written to"
    assert got["x"]._version == x + 1 and got["complex"]._version == other  # autograd looks at them


def test_memory_is_released_with_the_last_tensor_and_no_file_stays_open() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as file:
            return sum("memfd:batch" in line for line in file)

    ours, theirs = multiprocessing.get_context("fork").Pipe()
    before, others = len(os.listdir("/proc/self/fd")), mapped()
    kept = []
    for number in range(20):
        send(ours, number, {"x": torch.full((1000,), float(number)), "labels": torch.tensor(number)})
        kept.append(receive(theirs)[1])
    assert [row["x"][999].item() for row in kept] == list(range(20)) and mapped() == others + 20
    assert len(os.listdir("/proc/self/fd")) == before
    labels = [row["labels"] for row in kept]
    del kept
    assert mapped() == others + 20 and [label.item() for label in labels] == list(range(20))
    del labels
    assert mapped() == others
