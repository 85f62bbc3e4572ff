"""Checkpoints of a sharded run: each worker writes its own rows, in parallel with rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import Tensor

from raytrain.checkpoint.files import write_parts
from raytrain.checkpoint.safetensors import SHARD_BYTES, WrittenFile
from raytrain.checkpoint.snapshot import Staging, take_snapshot
from raytrain.errors import RaytrainError, RunError
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import open_store
from raytrain.train.parallel.collectives import Workers, WorkersGroup


class ShardSaver:
    """Writes one worker's part of each checkpoint. Collective: all workers create it at the same point.

    Workers other than rank 0 copy their rows into CPU buffers and write them in a background thread; finally, rank 0's
    writer gathers the results of those threads over a dedicated process group. Rank 0's own rows are part of the files
    that it writes anyway.

    Args:
        parts: returns the current state to save.
        run: the run folder.
    """

    def __init__(
        self, parts: Callable[[], Mapping[str, Any]], run: RunFolder, *, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._parts, self._run, self._shard_bytes = parts, run, shard_bytes
        group = dist.new_group(backend="gloo")
        self._workers = Workers()
        self._workers.use(WorkersGroup(group, group, lambda: None))
        self._first = self._workers.rank == 0
        self._pending: Future[None] | None = None
        if not self._first:
            self._staging = Staging()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="shards")
            self._copied()  # allocates the buffers now: the first copy takes far longer than later ones

    def begin_save(self, step: int) -> None:
        """Copy this worker's rows after `step` and write them in the background.

        Raises:
            RunError: the previous write failed.
        """
        if not self._first:
            self.wait()
            self._pending = self._thread.submit(self._write, self._copied(), self._run.checkpoint_dir(step))

    def finish_save(self, folder: str) -> dict[str, Any]:
        """Wait for the other workers and return their files, by name and by part. Called by rank 0's writer.

        Raises:
            RunError: another worker could not write; the message is that worker's.
        """
        files: dict[str, WrittenFile] = {}
        parts: dict[str, list[str]] = {}
        for result in self._workers.all_gather_object({}):
            if "error" in result:
                raise RunError(result["error"])
            files |= {name: WrittenFile(**written) for name, written in result.get("files", {}).items()}
            for part, names in result.get("parts", {}).items():
                parts.setdefault(part, []).extend(names)
        return {"files": files, "parts": parts}

    def wait(self) -> None:
        """Wait until this worker's write has finished; raise its exception once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for the write and stop the thread."""
        if not self._first:
            try:
                self.wait()
            finally:
                self._thread.shutdown()

    def _copied(self) -> dict[str, dict[str, Tensor]]:
        snapshot = take_snapshot(self._parts(), {}, step=0)
        rows = {part: {name: snapshot.tensors[part][name] for name in names} for part, names in snapshot.split.items()}
        return self._staging.copy(rows)

    def _write(self, rows: dict[str, dict[str, Tensor]], folder: str) -> None:
        rank = self._workers.rank
        try:
            self._staging.wait()
            files, parts = write_parts(
                open_store(folder), rows, fence=lambda: None, shard_bytes=self._shard_bytes, suffix=f".rank{rank:05d}"
            )
            result = {"files": {name: asdict(written) for name, written in files.items()}, "parts": parts}
        except (RaytrainError, OSError) as error:
            self._workers.all_gather_object({"error": f"rank {rank}: {error}"})
            raise
        self._workers.all_gather_object(result)
