"""Writes checkpoints in the background, and deletes those that are no longer kept.

A checkpoint exists once its manifest does, which is written last; a process that dies before leaves nothing valid.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal

from torch import Tensor

from raytrain.checkpoint.reader import COMPLETE, FORMAT, MANIFEST, STATE, best_checkpoint, list_checkpoints
from raytrain.checkpoint.safetensors import SHARD_BYTES, HashingStream, WrittenFile, shards, write_tensors
from raytrain.checkpoint.snapshot import Snapshot, Staging, take_snapshot
from raytrain.errors import RunError
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import plain
from raytrain.runs.storage import Store, open_store
from raytrain.trainable import RemoteCheckpoint


def write_checkpoint(
    store: Store,
    snapshot: Snapshot,
    about: Mapping[str, Any],
    *,
    fence: Callable[[], None] = lambda: None,
    shard_bytes: int = SHARD_BYTES,
    others: Callable[[], dict[str, Any]] | None = None,
) -> int:
    """Writes a snapshot into the empty directory `store`; returns the bytes written.

    Args:
        about: the manifest's fields that describe the run.
        fence: called before every file; raises to stop, and then there is no COMPLETE.
        others: waits for the files of other processes; returns {"files": ..., "parts": their files of our parts, and
            more fields for the manifest}.
    """
    files, parts = write_parts(store, snapshot.tensors, fence=fence, shard_bytes=shard_bytes)
    files[STATE] = _write_json(store, STATE, {"state": snapshot.state, "parts": snapshot.skeletons}, fence)
    more = others() if others is not None else {}
    files |= more.pop("files", {})
    for part, names in more.pop("parts", {}).items():
        parts[part] += names
    if snapshot.split:
        more["split"] = snapshot.split
    described = {name: asdict(written) for name, written in files.items()}
    manifest = {**about, "parts": parts, "tied": snapshot.tied, **more, "files": described}
    sealed = _write_json(store, MANIFEST, manifest, fence)
    store.sync_dir("")
    fence()
    store.write_bytes(COMPLETE, f"{sealed.sha256}\n".encode())
    store.sync_dir("")
    return sum(written.bytes for written in files.values()) + sealed.bytes


def write_parts(
    store: Store, tensors: Mapping[str, Mapping[str, Tensor]], *, fence: Callable[[], None], shard_bytes: int,
    suffix: str = "",
) -> tuple[dict[str, WrittenFile], dict[str, list[str]]]:  # fmt: skip
    """Writes part -> name -> tensor; the files, and their names by part. `suffix` follows the part in the names."""
    files: dict[str, WrittenFile] = {}
    parts: dict[str, list[str]] = {}
    for part, named in tensors.items():
        pieces = list(shards(named, shard_bytes=shard_bytes))
        parts[part] = []
        for index, piece in enumerate(pieces, start=1):
            number = f"-{index:05d}-of-{len(pieces):05d}" if len(pieces) > 1 else ""
            name = f"{part}{suffix}{number}.safetensors"
            fence()
            with store.open_write(name) as file:
                files[name] = write_tensors(file, piece)
            parts[part].append(name)
    return files, parts


def _write_json(store: Store, name: str, value: Any, fence: Callable[[], None]) -> WrittenFile:
    fence()
    with store.open_write(name) as file:
        stream = HashingStream(file)
        stream.write(json.dumps(value, allow_nan=False).encode())
    return stream.written()


# ---------------------------------------------------------------- retention


def discard(path: str) -> None:
    """Deletes a checkpoint directory, COMPLETE first, so that a partly deleted one never looks complete."""
    store = open_store(path)
    store.delete(COMPLETE)
    store.delete_tree("")


def retain(run: RunFolder, *, keep: int | Literal["all"], newest: int) -> list[int]:
    """Keeps the newest `keep` checkpoints up to step `newest`, and the best of them by eval loss; returns the steps
    that it deleted, also of directories without COMPLETE, since their writer has exited.

    Later checkpoints are not considered: they belong to an earlier course of the run that `discard_after` kept.
    """
    infos = [info for info in list_checkpoints(run) if info.step <= newest]
    whole = [info for info in infos if info.complete]
    kept = {info.step for info in (whole if keep == "all" else whole[-max(1, keep) :])}
    best = best_checkpoint(whole) if keep != "all" else None
    if best is not None:
        kept.add(best.step)
    gone = [info for info in infos if info.step not in kept]
    for info in gone:
        discard(info.path)
    return [info.step for info in gone]


def discard_after(run: RunFolder, step: int) -> list[int]:
    """Deletes the checkpoints after the one that an attempt starts from, which were rolled back or are damaged; returns
    their steps. If it starts from step 0, complete ones are kept: not loadable, but they are all that is left."""
    gone = [info for info in list_checkpoints(run) if info.step > step and (step or not info.complete)]
    for info in gone:
        discard(info.path)
    return [info.step for info in gone]


# ---------------------------------------------------------------- writer


class _Delay:
    """Postpones a write until its time, until it is `over` or until `cancel`, whichever comes first."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.over, self.cancelled = seconds, threading.Event(), False

    def cancel(self) -> None:
        """Does nothing if the write has begun, or if nothing postpones it: its thread may not have come to it yet."""
        self.cancelled = self.seconds > 0
        self.over.set()


class CheckpointWriter:
    """Writes the checkpoints of one attempt; used by one thread of rank 0.

    With `asynchronous`, `save` copies the state into reusable CPU buffers (`Staging`) and returns, and one background
    thread writes them; a second `save` waits for the first, so there is one copy of the state in flight. An error of
    the thread is raised by the next `save`, `wait` or `close`.

    A save with a `delay_s` stays in those buffers for that time before it is written. Any later call that waits for it
    writes it at once, except a save that replaces it.

    Args:
        keep: number of latest checkpoints to keep, besides the best by eval loss.
        asynchronous: False writes in the caller's thread; a GPU's tensors are copied one at a time.
        fence: raises if a newer attempt owns the run folder; called before every file and before COMPLETE.
        shard_bytes: a part larger than this is split into several files.

    Attributes:
        last_write_s, last_bytes, written_at: of the newest completed checkpoint, with `time.monotonic`; None before.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        *,
        keep: int | Literal["all"],
        asynchronous: bool,
        fence: Callable[[], None] | None = None,
        world_size: int = 1,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._run, self._world_size, self._shard_bytes = run_folder, world_size, shard_bytes
        self._keep: int | Literal["all"] = keep
        self._fence = fence or (lambda: None)
        self._staging = Staging() if asynchronous else None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None
        self._delay = _Delay(0.0)
        self.last_write_s: float | None = None
        self.last_bytes: int | None = None
        self.written_at: float | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @property
    def staged_bytes(self) -> int:
        return self._staging.nbytes if self._staging else 0

    def rehearse(self, parts: Mapping[str, Any]) -> None:
        """Before the first save, allocates the buffers and copies into them, without writing: the first copy into new
        memory takes far longer than later ones, so it is made as soon as optimizers have state."""
        if self._staging is not None and not self._staging.nbytes:
            take_snapshot(parts, {}, step=0, staging=self._staging)
            self._staging.wait()

    def save(
        self,
        parts: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        step: int,
        eval_loss: float | None = None,
        extra: Mapping[str, Any] | None = None,
        remote: RemoteCheckpoint | None = None,
        delay_s: float = 0.0,
        replaces: bool = False,
    ) -> float:
        """Saves the state after `step` steps; returns the seconds that the caller was blocked.

        Args:
            parts: part (model, optimizer, rng, ...) -> nested state or an object with `state_dict()`.
            state: small JSON state.
            eval_loss: the eval loss of exactly these weights, if known; it decides which checkpoint is the best.
            extra: additional fields of the manifest.
            remote: state that other processes write into the directory, which `prepare` has created.
            delay_s: seconds before the write begins; without a copy (synchronous, or with `remote`) it begins at once.
            replaces: a save that is still delayed is not written any more.

        Errors: RunError (disk full, naming the file and the key), CheckpointError (state that cannot be saved), what
        `fence` raises; with `asynchronous` those of the previous save.
        """
        began = time.perf_counter()
        if replaces:
            self._delay.cancel()
        self.wait()
        snapshot = take_snapshot(parts, state, step=step, staging=self._staging)
        about = {
            "format": FORMAT,
            "step": step,
            "created": datetime.now(UTC).isoformat(),
            "world_size": self._world_size,
            "eval_loss": eval_loss if eval_loss is not None and math.isfinite(eval_loss) else None,
            "extra": plain(dict(extra or {})),
        }
        if self._executor is None:
            self._write(snapshot, about, remote)
        else:
            self._delay = delay = _Delay(0.0 if remote is not None else delay_s)
            self._pending = self._executor.submit(self._write_later, delay, snapshot, about, remote)
        return time.perf_counter() - began

    def prepare(self, step: int) -> None:
        """Creates an empty directory for a checkpoint that other processes write into as well."""
        self.wait()
        self._fence()
        discard(self._run.checkpoint_dir(step))
        open_store(self._run.checkpoint_dir(step)).make_dir("")

    def abandon(self) -> None:
        """Closes without completing a checkpoint whose remote state is lost; leaves no partial checkpoint."""
        with contextlib.suppress(RunError):
            self.close()

    def wait(self) -> None:
        """Returns when nothing is being written or delayed; raises an error of the background thread once."""
        self._delay.over.set()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the write in progress and ends the thread; may be called twice."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()

    def _write_later(
        self, delay: _Delay, snapshot: Snapshot, about: dict[str, Any], remote: RemoteCheckpoint | None
    ) -> None:
        if self._staging is not None:
            self._staging.wait()
        delay.over.wait(delay.seconds)
        if not delay.cancelled:
            self._write(snapshot, about, remote)

    def _write(self, snapshot: Snapshot, about: dict[str, Any], remote: RemoteCheckpoint | None) -> None:
        began = time.perf_counter()
        path = self._run.checkpoint_dir(snapshot.step)
        self._fence()
        if remote is None:
            discard(path)
        try:
            self.last_bytes = write_checkpoint(
                open_store(path),
                snapshot,
                about,
                fence=self._fence,
                shard_bytes=self._shard_bytes,
                others=None if remote is None else lambda: remote.finish_save(path),
            )
        except BaseException:
            # Free the disk space, unless a newer attempt owns the directory by now.
            with contextlib.suppress(Exception):
                self._fence()
                discard(path)
            raise
        self.last_write_s, self.written_at = time.perf_counter() - began, time.monotonic()
        self._fence()
        retain(self._run, keep=self._keep, newest=snapshot.step)
