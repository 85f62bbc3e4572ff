"""The complete weights of a checkpoint, whichever processes wrote their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain.checkpoint.reader import STACKED, read_weights
from raytrain.checkpoint.safetensors import write_tensors
from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.errors import CheckpointError
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import open_store

STACK = {"layer.w": ["0.0.w", "0.1.w", "0.2.w"]}


class Others:
    """Two other processes: one wrote rows 0 and 2, the other row 1, each with more than the weights."""

    written = ((2, 0), (1,))

    def __init__(self, stacked: dict[str, list[str]]) -> None:
        self.stacked = stacked

    def begin_save(self, step: int) -> None:
        """Nothing: `finish_save` writes."""

    def finish_save(self, folder: str) -> dict[str, Any]:
        store, files = open_store(folder), {}
        for number, rows in enumerate(self.written, 1):
            name = f"others-{number}.safetensors"
            with store.open_write(name) as file:
                held = {f"0.{row}.w": torch.full((2,), float(row)) for row in rows}
                files[name] = write_tensors(file, held | {f"0.{row}.w.exp_avg": torch.ones(2) for row in rows})
        return {"files": files, STACKED: self.stacked}


def saved(folder: Path, stacked: dict[str, list[str]], *, others: type[Others] = Others) -> str:
    run = RunFolder(str(folder))
    tied = torch.arange(4.0)
    with CheckpointWriter(run, keep="all", asynchronous=False) as writer:
        writer.prepare(7)
        parts = {"model": {"a": tied, "b": tied}, "optimizer": {"m": torch.ones(3)}}
        writer.save(parts, {"loop": {"step": 7}}, step=7, eval_loss=0.5, remote=others(stacked))
    return run.checkpoint_dir(7)


def test_rows_of_other_processes_are_stacked_in_their_order(tmp_path: Path) -> None:
    found = read_weights(saved(tmp_path, STACK))
    assert sorted(found.tensors) == ["a", "b", "layer.w"] and torch.equal(found.tensors["a"], torch.arange(4.0))
    assert found.tensors["a"] is found.tensors["b"], "tied"
    assert found.tensors["layer.w"].tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert found.state == {"loop": {"step": 7}} and found.manifest["eval_loss"] == 0.5


def test_the_rows_of_more_than_ten_are_stacked_by_number_and_not_by_name(tmp_path: Path) -> None:
    """In the order of names, 10 and 11 come before 2."""
    stacked = {
        name: [f"0.{row}.w" for row in rows] for name, rows in (("up.w", range(12)), ("down.w", range(11, -1, -1)))
    }

    class Twelve(Others):
        written = ((11, 3, 2, 0, 7), (1, 10, 4, 5, 6, 9, 8))

    found = read_weights(saved(tmp_path, stacked, others=Twelve))
    assert found.tensors["up.w"][:, 0].tolist() == list(range(12))
    assert found.tensors["down.w"][:, 0].tolist() == list(range(11, -1, -1))


def test_a_row_that_nobody_wrote_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, {"layer.w": ["0.0.w", "0.3.w"]})
    with pytest.raises(CheckpointError, match=r"0\.3\.w is missing"):
        read_weights(path)


@pytest.mark.parametrize("name", ["model.safetensors", "others-2.safetensors", "optimizer.safetensors"])
def test_a_damaged_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = Path(saved(tmp_path, STACK)) / name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{name}: damaged"):
        read_weights(str(path.parent))
