"""What lies under a path to start from, read from headers alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from raytrain.checkpoint.writer import CheckpointWriter
from raytrain.errors import InputError
from raytrain.models.weights.headers import find_weights
from raytrain.models.weights.stored import StoredTensors, export_weights
from raytrain.runs.folder import RunFolder

KEY = "model.init_from"


class Tied(nn.Module):
    """An embedding that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.tokens.weight


def test_an_exported_file_lists_a_tied_weight_under_both_names(tmp_path: Path) -> None:
    export_weights(Tied().state_dict(), str(tmp_path / "model.safetensors"))
    found = find_weights(str(tmp_path / "model.safetensors"), key=KEY)
    assert found.shapes == {"tokens.weight": (5, 3), "head.weight": (5, 3)}
    assert (found.aliases, found.parameters) == ({"head.weight": "tokens.weight"}, 15)


def test_several_files_with_an_index_are_one_set_of_weights(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2, 3)}, tmp_path / "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert find_weights(str(tmp_path), key=KEY).shapes == {"a": (2,), "b": (2, 3)}
    (tmp_path / places["b"]).unlink()
    with pytest.raises(InputError, match=r"model.init_from: got no model-00002-of-00002.safetensors in"):
        find_weights(str(tmp_path), key=KEY)


def test_a_run_provides_its_exported_weights_or_its_latest_valid_checkpoint(tmp_path: Path) -> None:
    run = RunFolder.create(str(tmp_path), "run")
    with pytest.raises(InputError, match="without exported weights or a complete checkpoint"):
        (Path(run.path) / "checkpoints").mkdir()
        find_weights(run.path, key=KEY)
    writer = CheckpointWriter(run, keep=3, world_size=1, asynchronous=False)
    for step in (1, 2):
        writer.save({"model": Tied().state_dict(), "rng": {"seed": torch.zeros(step)}}, {"loop": {}}, step=step)
    writer.close()
    (Path(run.checkpoint_dir(2)) / "COMPLETE").unlink()
    for path in (run.path, run.checkpoint_dir(1)):
        found = find_weights(path, key=KEY)
        assert found.origin.endswith("step_00000001") and set(found.shapes) == {"tokens.weight", "head.weight"}
    export_weights(Tied().state_dict(), run.weights)
    assert find_weights(f"{tmp_path}/latest", key=KEY).origin.startswith("the exported weights of")


def test_a_checkpoint_of_several_workers_is_reassembled(tmp_path: Path) -> None:
    """Each has written its rows of what is sharded; the rest stands once, with rank 0's."""
    whole = {"a": torch.arange(10.0).reshape(5, 2), "b": torch.ones(3)}
    save_file({"a": whole["a"][:3].clone(), "b": whole["b"]}, tmp_path / "model.safetensors")
    save_file({"a": whole["a"][3:].clone()}, tmp_path / "model.rank00001.safetensors")
    parts = {"model": ["model.safetensors", "model.rank00001.safetensors"]}
    manifest = {"parts": parts, "tied": {"model": {"c": "a"}}, "split": {"model": ["a"]}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "COMPLETE").write_text("")
    found = find_weights(str(tmp_path), key=KEY)
    assert found.shapes == {"a": (5, 2), "b": (3,), "c": (5, 2)}
    read = StoredTensors(found).read_all()
    assert torch.equal(read["a"], whole["a"]) and read["c"] is read["a"] and torch.equal(read["b"], whole["b"])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (None, b"", "nothing at"),
        ("notes.txt", b"x", "no weights in"),
        ("pytorch_model.bin", b"x", "may run code"),
        ("model.safetensors", b"\x08\0\0\0\0\0\0\0nonsense", "expected a safetensors file"),
        ("model.safetensors", b"short", "expected a safetensors file"),
        ("model.safetensors", b"\xff" * 16, "a header of"),
    ],
)
def test_a_folder_without_weights_is_refused(tmp_path: Path, name: str | None, content: bytes, says: str) -> None:
    folder = tmp_path / "folder"
    if name is not None:
        folder.mkdir()
        (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=says):
        find_weights(str(folder), key=KEY)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"model.init_from: got no file at nowhere/model.safetensors"):
        find_weights("nowhere/model.safetensors", key=KEY)


def test_headers_are_read_without_torch() -> None:
    imports = "import sys, raytrain.models.huggingface, raytrain.data.sources.tokenised"
    code = f"{imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
