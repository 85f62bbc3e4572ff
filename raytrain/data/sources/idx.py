"""IDX image files (the format of MNIST), optionally gzipped. Torch is imported only to open them."""

from __future__ import annotations

import gzip
import math
import zlib
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from raytrain.data.rows.contract import Source, facts_of, split_off
from raytrain.errors import InputError
from raytrain.plan.facts import DataFacts
from raytrain.runs.storage import read_bytes

if TYPE_CHECKING:
    from raytrain.data.rows.splits import TensorSplit

GZIP_MAGIC = b"\x1f\x8b"
HEADER_BYTES = 4 + 4 * 4
UNSIGNED_BYTE = 0x08


def _checked_shape(data: bytes, *, path: str, key: str, ranks: tuple[int, ...], what: str) -> tuple[int, ...]:
    """The dimensions of an IDX file of unsigned bytes, from its header. Raises InputError: not such a file, or a
    truncated header."""
    if len(data) < 4 or data[:2] != b"\0\0":
        seen = f"{path}, which starts with {data[:4].hex() or 'nothing'}"
        raise InputError(key, got=seen, expected="an IDX file (0000 08..)")
    if data[2] != UNSIGNED_BYTE:
        raise InputError(key, got=f"IDX values of type 0x{data[2]:02x} in {path}", expected="bytes (type 0x08)")
    rank = data[3]
    if len(data) < 4 + 4 * rank:
        raise InputError(key, got=f"{path}, truncated in its header", expected=f"{rank} dimensions")
    shape = tuple(int(size) for size in np.frombuffer(data, dtype=">u4", count=rank, offset=4))
    if len(shape) not in ranks:
        expected = f"{what} of {' or '.join(map(str, ranks))} dimensions"
        raise InputError(key, got=f"an IDX file of shape {shape} at {path}", expected=expected)
    if not math.prod(shape):
        raise InputError(key, got=f"shape {shape} in {path}", expected=f"a file with {what}")
    return shape


def _damaged(path: str, error: Exception, *, key: str) -> InputError:
    return InputError(key, got=f"a damaged gzip file at {path}: {error}", expected="a complete file")


IMAGES = {"ranks": (3, 4), "what": "images"}
LABELS = {"ranks": (1,), "what": "labels"}


def read_shape(path: str, *, key: str, ranks: tuple[int, ...], what: str) -> tuple[int, ...]:
    """Return the dimensions of one file; only its first bytes are read."""
    data = read_bytes(path, key=key, limit=4096)
    if data[:2] == GZIP_MAGIC:
        try:
            data = zlib.decompressobj(wbits=31).decompress(data, HEADER_BYTES)
        except zlib.error as error:
            raise _damaged(path, error, key=key) from error
    return _checked_shape(data, path=path, key=key, ranks=ranks, what=what)


def read_idx(path: str, *, key: str, ranks: tuple[int, ...], what: str) -> np.ndarray:
    """Read one file as a writable uint8 array. Raises InputError: not such a file, a size that differs from its
    header, or an empty file."""
    data = read_bytes(path, key=key)
    if data[:2] == GZIP_MAGIC:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise _damaged(path, error, key=key) from error
    shape = _checked_shape(data, path=path, key=key, ranks=ranks, what=what)
    start, needed = 4 + 4 * len(shape), math.prod(shape)
    if len(data) - start != needed:
        raise InputError(
            key, got=f"{len(data) - start:,} bytes of values in {path}", expected=f"{needed:,} for the shape {shape}"
        )
    return np.frombuffer(bytearray(data), dtype=np.uint8, offset=start).reshape(shape)


def _check_counts(images: int, labels: int, *, path: str, key: str) -> None:
    if images != labels:
        raise InputError(key, got=f"{labels:,} labels", expected=f"{images:,}, one for each image of {path}")


def describe_idx(
    images: str, labels: str, eval_images: str | None, eval_labels: str | None, *, fraction: float
) -> DataFacts:
    rows, row_bytes = _shape_of_pair(images, labels, prefix="data.")
    evaluation = None
    if eval_images is not None and eval_labels is not None:
        evaluation = _shape_of_pair(eval_images, eval_labels, prefix="data.eval_")[0]
    reason = partial(_sentence, row_bytes - 1)
    return DataFacts.of_rows(rows, evaluation, fraction=fraction, row_bytes=row_bytes, reason=reason)


def count_idx_classes(labels: str, eval_labels: str | None) -> int:
    """Return the number of classes: the largest label plus one. Reads the label files, a byte a row."""
    files = {"data.labels": labels} | ({} if eval_labels is None else {"data.eval_labels": eval_labels})
    return max(int(read_idx(path, key=key, **LABELS).max()) for key, path in files.items()) + 1


def _shape_of_pair(images: str, labels: str, *, prefix: str) -> tuple[int, int]:
    shape = read_shape(images, key=f"{prefix}images", **IMAGES)
    count = read_shape(labels, key=f"{prefix}labels", **LABELS)[0]
    _check_counts(shape[0], count, path=images, key=f"{prefix}labels")
    return shape[0], math.prod(shape[1:]) + 1


def _sentence(values: int, train: int, evaluation: int) -> str:
    return f"IDX images of {values:,} bytes: {train:,} to train on, {evaluation:,} for evaluation"


def open_idx(images: str, labels: str, eval_images: str | None, eval_labels: str | None, *, fraction: float) -> Source:
    """Open images `x` (B, C, H, W) float32 in [0, 1] and `labels` (B,) int64; both stay bytes until gathered."""
    train, classes = _open_pair(images, labels, prefix="data.")
    evaluation: TensorSplit | None
    if eval_images is not None and eval_labels is not None:
        evaluation, others = _open_pair(eval_images, eval_labels, prefix="data.eval_")
        expected, seen = (tuple(one.columns["x"].shape[1:]) for one in (train, evaluation))
        if seen != expected:
            got = f"images of {seen} in {eval_images}"
            raise InputError("data.eval_images", got=got, expected=f"{expected} as in data.images")
        classes = max(classes, others)
    else:
        train, evaluation = split_off(train, fraction)
    held = 0 if evaluation is None else len(evaluation)
    reason = _sentence(math.prod(train.columns["x"].shape[1:]), len(train), held)
    return Source(
        train=train,
        eval=evaluation,
        facts=facts_of(train, evaluation, reason=reason),
        describe=f"{reason}, {classes} classes",
        classes=classes,
    )


def _open_pair(images: str, labels: str, *, prefix: str) -> tuple[TensorSplit, int]:
    import torch

    from raytrain.data.rows.splits import TensorSplit

    pixels = read_idx(images, key=f"{prefix}images", **IMAGES)
    targets = read_idx(labels, key=f"{prefix}labels", **LABELS)
    _check_counts(len(pixels), len(targets), path=images, key=f"{prefix}labels")
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    columns = {"x": torch.from_numpy(pixels), "labels": torch.from_numpy(targets)}
    return TensorSplit(columns, divisors={"x": 255.0}), int(targets.max()) + 1
