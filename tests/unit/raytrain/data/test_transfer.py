"""The one function that moves batches: any nesting, each tensor by itself, real copies counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from raytrain.data.rows.residency import TRANSFERS, TransferCounts, dense, to_device


@dataclass(frozen=True)
class Boxes:
    corners: Tensor
    note: str
    mask: Tensor | None = None


class Pair(NamedTuple):
    left: Tensor
    right: Any


def nested(device: str = "cpu") -> dict[str, Any]:
    return {
        "x": torch.zeros(2, 3, device=device),
        "parts": [torch.ones(1, device=device), (torch.ones(2, device=device), "text", None)],
        "boxes": Boxes(torch.ones(4, device=device), "a note"),
        "pair": Pair(torch.ones(1, device=device), [None, 3]),
    }


def moved(value: Any, device: str) -> tuple[Any, TransferCounts]:
    before = replace(TRANSFERS)
    return to_device(value, device), TRANSFERS.since(before)


@pytest.mark.covers("DATA-12")
def test_any_nesting_survives_the_way_there() -> None:
    there, copies = moved(nested(), "meta")
    assert there["x"].is_meta and there["parts"][0].is_meta and there["parts"][1][0].is_meta
    assert there["parts"][1][1:] == ("text", None) and isinstance(there["parts"], list)
    assert isinstance(there["boxes"], Boxes) and there["boxes"].corners.is_meta and there["boxes"].note == "a note"
    assert isinstance(there["pair"], Pair) and there["pair"].left.is_meta and there["pair"].right == [None, 3]
    assert (copies.tensors, copies.in_place) == (5, 0) and copies.bytes == 4 * (6 + 1 + 2 + 4 + 1)


@pytest.mark.covers("DATA-11", "BP-16", "SRC-08")
def test_a_tensor_on_the_device_is_returned_without_a_copy() -> None:
    batch = nested()
    there, copies = moved(batch, "cpu")
    assert there["x"] is batch["x"] and there["boxes"].corners is batch["boxes"].corners
    assert there["parts"][1][0] is batch["parts"][1][0]
    assert (copies.tensors, copies.bytes, copies.in_place) == (0, 0, 5)
    mixed = [torch.zeros(2, device="meta"), torch.zeros(3), {"deep": torch.zeros(1)}]  # the first proves nothing
    there, copies = moved(mixed, "meta")
    assert there[0] is mixed[0] and there[1].is_meta and there[2]["deep"].is_meta
    assert (copies.tensors, copies.in_place) == (2, 1)


def test_a_packed_sequence_is_moved_with_its_own_method_and_only_if_needed() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    there, copies = moved({"sequence": packed}, "cpu")
    assert there["sequence"] is packed and (copies.tensors, copies.in_place) == (0, 1)


class Tracked(Tensor):
    """Notes how it is copied."""

    told: ClassVar[list[bool]] = []
    pinned = False

    def is_pinned(self, device: Any = None) -> bool:
        return self.pinned

    def to(self, *arguments: Any, non_blocking: bool = False, **named: Any) -> Tensor:
        self.told.append(non_blocking)
        return super().to(*arguments, non_blocking=non_blocking, **named)


@pytest.mark.covers("DATA-02", "BP-18", "BP-03")
def test_a_copy_from_pinned_memory_does_not_block_and_on_a_cpu_there_is_none() -> None:
    Tracked.told.clear()
    tensor = torch.ones(3).as_subclass(Tracked)
    _, copies = moved([tensor], "meta")
    assert Tracked.told == [False] and (copies.tensors, copies.blocking) == (1, 1)
    tensor.pinned = True
    _, copies = moved([tensor], "meta")
    assert Tracked.told == [False, True] and (copies.tensors, copies.blocking) == (1, 0)
    here, copies = moved([tensor], "cpu")
    assert here[0] is tensor and len(Tracked.told) == 2 and copies == TransferCounts(in_place=1)


@pytest.mark.covers("TRB-15")
def test_each_copy_is_counted_by_its_source_and_whether_the_host_waited_for_it() -> None:
    pinned, plain = torch.ones(2, 3).as_subclass(Tracked), torch.ones(5).as_subclass(Tracked)
    pinned.pinned = True
    _, copies = moved({"x": pinned, "mask": [plain, torch.zeros(1, device="meta")]}, "meta")
    assert copies == TransferCounts(tensors=2, bytes=44, in_place=1, pinned=1, non_blocking=1, pageable=1)
    assert copies.blocking == 1
    copies.add(400, source=torch.device("cuda:1"), pinned=False)
    assert copies == TransferCounts(3, 444, in_place=1, pinned=1, non_blocking=1, pageable=1, other_device=1)
    both = TransferCounts.total([copies, TransferCounts(2, 999_556, pinned=2, non_blocking=2)])
    assert both.describe("cuda") == (
        "5 tensors of batches (1.0 MB) copied to cuda: 3 from pinned memory, 3 non-blocking; the host waited for "
        "1 whose source was ordinary memory and 1 from another device"
    )
    assert "waited" not in TransferCounts(2, 8, pinned=2, non_blocking=2).describe("cuda")
    assert TransferCounts(in_place=1).describe("cpu") == "no copies: all 1 tensor of batches were on cpu already"


def test_a_packed_sequence_of_pinned_memory_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, given = pack_sequence([torch.ones(3), torch.ones(2)]), list[dict[str, Any]]()
    to = type(packed).to
    monkeypatch.setattr(type(packed), "to", lambda own, *device, **how: given.append(how) or to(own, *device, **how))
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor, device=None: tensor is packed.data)
    there, copies = moved({"sequence": packed}, "meta")
    assert there["sequence"].data.is_meta and given == [{"non_blocking": True}]
    assert copies == TransferCounts(tensors=1, bytes=20, pinned=1, non_blocking=1)


@pytest.mark.covers("MEM-10")
def test_only_what_is_not_dense_is_made_contiguous_and_once() -> None:
    plain, images = torch.zeros(4, 6), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert dense(plain) is plain and dense(images) is images, "an order of channels that kernels know is no disorder"
    turned = torch.arange(24.0).reshape(4, 6).t()
    there, _ = moved({"x": turned}, "cpu")
    assert there["x"] is not turned and there["x"].is_contiguous() and torch.equal(there["x"], turned)
    again, _ = moved(there, "cpu")
    assert again["x"] is there["x"]
