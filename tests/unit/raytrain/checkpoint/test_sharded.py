"""Rows of tensors in several files: which are whose, and reading them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from raytrain.checkpoint.safetensors import ShardPosition, read_split, rows_of
from raytrain.errors import CheckpointError


@pytest.mark.parametrize("total", [0, 1, 2, 5, 8, 31])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_are_cut_as_torch_cuts_chunks(total: int, world_size: int) -> None:
    spans = [rows_of(total, ShardPosition(rank, world_size)) for rank in range(world_size)]
    ours = [list(range(*span)) for span in spans]
    theirs = [chunk.tolist() for chunk in torch.arange(total).chunk(world_size)] if total else []
    assert [rows for rows in ours if rows] == theirs
    assert [row for rows in ours for row in rows] == list(range(total))


@pytest.mark.parametrize("wrote", [1, 2, 3])
def test_tensors_written_by_some_ranks_are_read_by_others(tmp_path: Path, wrote: int) -> None:
    whole = {"a": torch.arange(21.0).view(7, 3), "b": torch.arange(2), "c": torch.ones(1, 4)}
    files = []
    for rank in range(wrote):
        rows = {
            name: value[slice(*rows_of(len(value), ShardPosition(rank, wrote)))].clone()
            for name, value in whole.items()
        }
        files.append(str(tmp_path / f"{rank}.safetensors"))
        save_file({**rows, "other": torch.zeros(1)}, files[-1])
    assert {name: value.tolist() for name, value in read_split(files, whole, None).items()} == {
        name: value.tolist() for name, value in whole.items()
    }
    for world_size in (1, 2, 3, 4):
        for rank in range(world_size):
            found = read_split(files, whole, ShardPosition(rank, world_size))
            for name, value in whole.items():
                expected = value[slice(*rows_of(len(value), ShardPosition(rank, world_size)))]
                assert found[name].shape == expected.shape and torch.equal(found[name], expected)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    file = str(tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match="the tensor b is missing"):
        read_split([file], ["a", "b"], None)
    (tmp_path / "bad").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="no readable safetensors"):
        read_split([str(tmp_path / "bad")], ["a"], None)
