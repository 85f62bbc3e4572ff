"""Experts in a checkpoint: one file for each host, its tensors named by (layer, logical expert), never by rank.

A host takes a snapshot in memory after a commit and writes it in a thread: the tensors, then a small JSON file that
describes them. Rank 0 waits for the JSON files of all hosts before it writes its manifest.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from cluster.telemetry.processes import WORK
from experts.config import Key
from experts.member.shard import ExpertShard
from raytrain.checkpoint.reader import read_manifest
from raytrain.checkpoint.safetensors import WrittenFile, read_tensors, write_tensors
from raytrain.errors import CheckpointError, RunError, StateLost
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import open_store

POLL_S = 0.02
#: Timeout of the wait for a host's files.
WRITE_S = 1800.0
PART = "experts"


def snapshot(shard: ExpertShard) -> dict[Key, dict[str, Tensor]]:
    """State of the experts at home on one host: (layer, expert) -> name -> CPU tensor, a copy of the live one."""
    return {
        key: {name: value.detach().to("cpu", copy=True) for name, value in shard.state_of(key).items()}
        for key in shard.homes()
    }


class ExpertFiles:
    """Writes and loads one host's part of a run's checkpoints; writes one at a time, in the background."""

    def __init__(self, run_path: str, *, host: int) -> None:
        self._run, self.host = RunFolder(run_path), host
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._read: SimpleQueue[Future[dict[str, Tensor]] | None] = SimpleQueue()

    def begin(self, experts: dict[Key, dict[str, Tensor]], *, step: int) -> None:
        """Start to write a `snapshot`, after the last write has finished."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(experts, step), daemon=True, name="expert-files")
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, experts: dict[Key, dict[str, Tensor]], step: int) -> None:
        store = open_store(self._run.checkpoint_dir(step))
        name = f"{PART}-{self.host:05d}.safetensors"
        described: dict[str, Any] = {"name": name, "experts": [list(key) for key in experts]}
        try:
            tensors = {
                f"{layer}.{expert}.{field}": value
                for (layer, expert), state in experts.items()
                for field, value in state.items()
            }
            with store.open_write(name) as file:
                described["file"] = asdict(write_tensors(file, tensors))
        except Exception as error:  # reported to rank 0, which gives the checkpoint up
            described["error"] = f"{type(error).__name__}: {error}"
        store.write_bytes(f"{PART}-{self.host:05d}.json", json.dumps(described).encode())

    def load(self, shard: ExpertShard, folder: str) -> None:
        """Load this host's experts, homes and replicas, from a checkpoint of any number of hosts.

        Raises:
            CheckpointError: an expert is missing, occurs twice or has other shapes; names it. StateLost: `stop` was
                called.
        """
        where = locate(read_manifest(folder), [shape.num_experts for shape in shard.shapes])
        homes = set(shard.homes())
        wanted: dict[str, list[Key]] = {}
        for key in shard.held():
            wanted.setdefault(where[key], []).append(key)
        for name, keys in wanted.items():
            tensors = self._tensors_of(folder, name)
            for key in keys:
                prefix = f"{key[0]}.{key[1]}."
                state = {field[len(prefix) :]: value for field, value in tensors.items() if field.startswith(prefix)}
                if not state:
                    raise CheckpointError(f"{name} lacks layer {key[0]} expert {key[1]}, which its manifest names")
                for field, shape in shard.shapes[key[0]].weights(key[1]).items():
                    seen = tuple(state[field].shape) if field in state else None
                    if seen != shape:
                        raise CheckpointError(
                            f"layer {key[0]} expert {key[1]}: {field} is {seen}, the model's is {shape}"
                        )
                (shard.load_state if key in homes else shard.set_weights)(key, state)

    def stop(self) -> None:
        """End `load` at once, from another thread: the generation is over. A read that is under way goes on, and nobody
        waits for it: a large file may take longer than the others wait for this host in the next generation."""
        self._stopped = True
        self._read.put(None)

    def _tensors_of(self, folder: str, name: str) -> dict[str, Tensor]:
        def read() -> None:
            future: Future[dict[str, Tensor]] = Future()
            try:
                future.set_result(read_tensors_of(folder, name))
            except Exception as error:
                future.set_exception(error)
            self._read.put(future)

        threading.Thread(target=read, daemon=True, name="expert-read").start()
        found = self._read.get()
        if found is None or self._stopped:
            raise StateLost("the generation ended while its experts were read from a checkpoint")
        return found.result()


def locate(manifest: Mapping[str, Any], num_experts: Iterable[int]) -> dict[Key, str]:
    """Return which file of a checkpoint holds each (layer, expert).

    Raises:
        CheckpointError: the checkpoint has no expert files, or an expert is missing or occurs twice.
    """
    described = manifest.get("experts")
    if described is None:
        raise CheckpointError("this checkpoint holds its experts inside the model: resume it with experts.hosts 0")
    where: dict[Key, str] = {}
    for name, keys in described.items():
        for layer, expert in keys:
            if (layer, expert) in where:
                raise CheckpointError(
                    f"layer {layer} expert {expert} occurs twice: in {where[layer, expert]} and in {name}"
                )
            where[layer, expert] = name
    wanted = {(layer, expert) for layer, number in enumerate(num_experts) for expert in range(number)}
    for layer, expert in sorted(wanted - set(where)):
        raise CheckpointError(f"layer {layer} expert {expert} is missing: no file of the checkpoint holds it")
    for layer, expert in sorted(set(where) - wanted):
        raise CheckpointError(f"layer {layer} expert {expert} in {where[layer, expert]} is not in the model")
    return where


def read_tensors_of(folder: str, name: str) -> dict[str, Tensor]:
    """Read the tensors of one file of a checkpoint, in local or remote storage."""
    with tempfile.TemporaryDirectory(prefix="raytrain-") as scratch:
        return read_tensors(open_store(folder).local_copy(name, scratch))


def await_files(folder: str, hosts: int, *, lost: Callable[[], str | None]) -> dict[str, Any]:
    """Wait until every host has written its part of a checkpoint; called by rank 0's writer.

    Returns:
        {"files": {name: WrittenFile}, "experts": {name: keys}}, for the manifest.

    Raises:
        StateLost: the generation ended meanwhile.
        RunError: a host could not write, or not in time.
    """
    store, ends = open_store(folder), time.monotonic() + WRITE_S
    missing, files, keys = set(range(hosts)), {}, {}
    while missing:
        for host in sorted(missing):
            name = f"{PART}-{host:05d}.json"
            if not store.exists(name):
                continue
            described = json.loads(store.read_bytes(name))
            if "error" in described:
                raise RunError(f"expert host {host} could not write its part of {folder}: {described['error']}")
            files[described["name"]] = WrittenFile(**described["file"])
            keys[described["name"]] = described["experts"]
            store.delete(name)
            missing.discard(host)
        # a host that died takes its part with it, and the run goes back to the checkpoint before
        if missing and (reason := lost()) is not None:
            raise StateLost(f"the checkpoint in {folder} was given up: {reason}")
        if missing and time.monotonic() > ends:
            why = f"expert hosts {sorted(missing)} wrote nothing within {WRITE_S:g} s"
            raise RunError(f"the checkpoint in {folder} was given up: {why}")
        if missing:
            WORK.add()  # the wait has limits of its own: a host that does not respond, and `WRITE_S`
            time.sleep(POLL_S)
    return {"files": files, "experts": keys}
