"""Tensors in safetensors files: a streaming writer, a reader, and tensors whose rows several workers saved.

No file of a run holds a pickle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.telemetry.processes import WORK
from raytrain.errors import CheckpointError

CHUNK_BYTES = 16 * 2**20
SHARD_BYTES = 2 * 2**30

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.complex64: "C64", torch.bool: "BOOL",
}  # fmt: skip
"""Every dtype that all allowed versions of the safetensors library read."""


@dataclass(frozen=True)
class WrittenFile:
    bytes: int
    sha256: str


class HashingStream:
    """Passes bytes on to `file` in bounded pieces and hashes them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Writes all of `data`; an unbuffered file may accept less per call."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            self._hash.update(piece)
            self._bytes += len(piece)
            WORK.add()
            while piece:
                taken = self._file.write(piece)
                piece = piece[len(piece) if taken is None else taken :]

    def written(self) -> WrittenFile:
        return WrittenFile(bytes=self._bytes, sha256=self._hash.hexdigest())


def sha256_of(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        WORK.add()
        digest.update(piece)
    return digest.hexdigest()


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Writes one safetensors file: header length, JSON header, raw little-endian data.

    The tensors may be on any device, with any strides; each comes to the CPU when it is written. Larger element sizes
    go first, which keeps every tensor aligned (the format allows no gaps). Errors: CheckpointError for a dtype that the
    format or we do not know.
    """
    names = _in_file_order(tensors)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    stream = HashingStream(file)
    stream.write(encoded_header(header))
    for name in names:
        plain = tensors[name].detach().cpu().resolve_conj().resolve_neg()  # a conjugated view has the bytes of its base
        stream.write(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return stream.written()


def encoded_header(header: Mapping[str, object]) -> bytes:
    """The begin of a file: the length of the JSON, and the JSON; the format aligns the tensors to 8 bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def shards(tensors: Mapping[str, Tensor], *, shard_bytes: int = SHARD_BYTES) -> Iterator[dict[str, Tensor]]:
    """Splits tensors over files of at most `shard_bytes`; a larger tensor gets a file of its own."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name in _in_file_order(tensors):
        nbytes = tensors[name].numel() * tensors[name].element_size()
        if shard and size + nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensors[name]
        size += nbytes
    if shard:
        yield shard


def read_tensors(path: str, *, without: Collection[str] = ()) -> dict[str, Tensor]:
    """Copies of all tensors of a local safetensors file except some names: the library's tensors are memory maps of the
    file, which may be deleted. Errors: CheckpointError for any other file, OSError if it cannot be read."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = [name for name in file.keys() if name not in without]  # noqa: SIM118 (no mapping)
            found = dict[str, Tensor]()
            for name in names:
                WORK.add()
                found[name] = file.get_tensor(name).clone()
            return found
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: no readable safetensors file ({error})") from error


def _in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name}: a tensor of {tensor.dtype} cannot be saved in a safetensors file")
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


# ---------------------------------------------------------------- sharded


class ShardPosition(NamedTuple):
    rank: int
    world_size: int


def rows_of(total: int, place: ShardPosition) -> tuple[int, int]:
    """(first row, end) of a worker's part of `total` rows, as FSDP2 cuts them: equal parts, the last ones shorter or
    empty."""
    size = -(-total // place.world_size)
    return min(place.rank * size, total), min((place.rank + 1) * size, total)


def read_split(paths: Sequence[str], names: Iterable[str], place: ShardPosition | None) -> dict[str, Tensor]:
    """Copies of tensors whose rows are stored one after another in local safetensors files; with `place`, only the rows
    of that worker. Errors: as `read_tensors`, and CheckpointError for a missing tensor."""
    wanted = set(names)
    held: dict[str, list[int]] = {name: [] for name in wanted}  # rows in each file that has some
    try:
        for path in paths:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in wanted.intersection(file.keys()):
                    held[name].append(int(file.get_slice(name).get_shape()[0]))
        missing = sorted(name for name, found in held.items() if not found)
        if missing:
            raise CheckpointError(f"the tensor {missing[0]} is missing")
        spans = {name: rows_of(sum(rows), place) if place else (0, sum(rows)) for name, rows in held.items()}
        pieces: dict[str, list[Tensor]] = {name: [] for name in wanted}
        seen = dict.fromkeys(wanted, 0)
        for path in paths:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in wanted.intersection(file.keys()):
                    WORK.add()
                    rows, (first, end) = file.get_slice(name), spans[name]
                    count, begin = int(rows.get_shape()[0]), seen[name]
                    seen[name] = begin + count
                    low, high = min(max(first - begin, 0), count), min(end - begin, count)
                    if low < high or not pieces[name]:  # some piece, so that an empty share has its shape
                        pieces[name].append(rows[low : max(low, high)].clone())
        return {name: torch.cat(found) for name, found in pieces.items()}
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"no readable safetensors file among {', '.join(paths)} ({error})") from error
