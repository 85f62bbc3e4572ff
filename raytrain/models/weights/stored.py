"""The safetensors files of a whole model as one mapping that reads a tensor when it is asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from raytrain.checkpoint.safetensors import write_tensors
from raytrain.checkpoint.snapshot import split_tied
from raytrain.errors import InputError
from raytrain.runs.storage import open_store


class StoredTensors(Mapping[str, Tensor]):
    """Name -> tensor on the CPU of a folder that transformers' `save_pretrained` wrote, or of one file.

    Args:
        path: a folder with *.safetensors in it, or such a file.
    Raises:
        InputError: no such files, one that cannot be read, or a tensor that two files hold.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            raise InputError(str(path), seen="no *.safetensors there", expected="a folder with some, or such a file")
        self._files: dict[str, Any] = {}
        for file in files:
            try:
                opened: Any = safe_open(file, framework="pt")
                names = list(opened.keys())
            except (SafetensorError, OSError) as error:
                raise InputError(str(file), seen=str(error), expected="a safetensors file") from error
            for name in names:
                if name in self._files:
                    raise InputError(name, seen=f"it twice, also in {file.name}", expected="each tensor in one file")
                self._files[name] = opened
        self._check_index(path / "model.safetensors.index.json")

    def _check_index(self, index: Path) -> None:
        """A folder's index says which tensors there are, so that a lost file is noticed."""
        if not index.is_file():
            return
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            if name not in self._files:
                raise InputError(name, seen=f"no such tensor in {index.parent}", expected=f"it in {file}")

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def export_weights(module_state: Mapping[str, Tensor], path: str, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes weights for plain PyTorch: `safetensors.torch.load_model(model, path)` takes them.

    Tied weights are written once; on a local path the file appears whole. Errors: RunError, CheckpointError.

    Args:
        module_state: a module's state_dict, on any device.
        path: local path or URI of the file.
        metadata: text beside the tensors.
    """
    folder, _slash, name = path.rpartition("/")
    store = open_store(folder or ".")
    distinct, tied = split_tied(module_state)
    on_cpu = {key: tensor.detach().cpu() for key, tensor in distinct.items()}
    # The aliases are noted as safetensors' own save_model does; transformers asks for the format.
    notes = {**(metadata or {}), **tied, "format": "pt"}
    partial = f".{name}.tmp" if store.is_local else name
    with store.open_write(partial) as file:
        write_tensors(file, on_cpu, metadata=notes)
    if store.is_local:
        os.replace(f"{store.uri}/{partial}", f"{store.uri}/{name}")
