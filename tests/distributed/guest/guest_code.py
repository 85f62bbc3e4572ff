"""Code as a user of raytrain writes it: a model, data and observers, with faults that a test asks for by key."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, CLASSES = 8, 4


def rows(count: int = 240, bad: int | None = None) -> dict[str, Any]:
    """DET: a synthetic classification task with a fixed seed; row `bad` holds a NaN."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(count + 40, FEATURES, generator=draw)
    labels = (x @ torch.randn(FEATURES, CLASSES, generator=draw)).argmax(dim=1)
    if bad is not None:
        x[bad, 0] = float("nan")
    table = {"x": x, "labels": labels, "row": torch.arange(count + 40)}
    return {
        "train": {name: column[:count] for name, column in table.items()},
        "eval": {name: column[count:] for name, column in table.items()},
    }


class Slow:
    """The rows of a table one by one, each of which takes its time."""

    def __init__(self, table: dict[str, Tensor], pause: float) -> None:
        self.table, self.pause = table, pause

    def __len__(self) -> int:
        return len(self.table["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.pause)
        return {name: column[index] for name, column in self.table.items()}


def slow_rows(pause: float) -> dict[str, Any]:
    """`rows`, asked for one by one."""
    return {name: Slow(table, pause if name == "train" else 0.0) for name, table in rows().items()}


class Net(nn.Module):
    """Two layers with dropout, in the transformers convention; counts its training passes in a buffer."""

    calls: Tensor

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, CLASSES)
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, labels: Tensor, row: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.calls += 1
            self.trouble(int(self.calls), row)
        return {"loss": F.cross_entropy(self.layers(x).float(), labels)}

    def trouble(self, call: int, row: Tensor) -> None:
        """Nothing: for a subclass."""


class Troubled(Net):
    """A `Net` with a fault at training pass `at`; the words for `fault` are the names of its methods."""

    def __init__(self, width: int, dropout: float, *, fault: str, at: int, note: str, pause: float) -> None:
        super().__init__(width, dropout)
        self._fault, self._at, self._note, self._pause = fault, at, note, pause
        self._poisoned = self._spoken = False

    def forward(self, x: Tensor, labels: Tensor, row: Tensor) -> dict[str, Tensor]:
        output = super().forward(x, labels, row)
        return {"loss": output["loss"] * float("inf")} if self.training and self._poisoned else output

    def trouble(self, call: int, row: Tensor) -> None:
        time.sleep(self._pause)  # a model that takes its time, so that a signal finds it training
        if self._fault:
            getattr(self, self._fault)(call, row)

    def always_raises(self, call: int, row: Tensor) -> None:
        if call == self._at:
            raise KeyError(f"planted at pass {call}")

    def exits(self, call: int, row: Tensor) -> None:
        if call == self._at:
            sys.exit(3)

    def fails_under_autocast(self, call: int, row: Tensor) -> None:
        if call == self._at and torch.is_autocast_enabled("cpu"):
            raise RuntimeError("\"planted_kernel\" not implemented for 'BFloat16'")

    def lives_hard(self, call: int, row: Tensor) -> None:
        """Speaks once in each process; hangs at pass `at` until there is a file `go`; rank 1 dies once, later."""
        rank, notes = dist.get_rank(), Path(self._note)
        if not self._spoken:
            self._spoken = True
            print(f"rank {rank} came to this life")
        while call == self._at and not (notes / "go").exists():
            time.sleep(0.05)
        if call == self._at + 40 and rank == 1 and not (notes / "killed").exists():
            (notes / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def shuts_the_store(self, call: int, row: Tensor) -> None:
        """Raises in pass `at`, and from then on no checkpoint below `note` can be read; none is damaged."""
        if call == self._at:
            runs = Path(self._note) / "runs"
            while not (marks := sorted(runs.glob("*/checkpoints/*/COMPLETE"))):
                time.sleep(0.05)
            manifest = marks[-1].parent / "manifest.json"
            manifest.rename(Path(self._note) / "manifest.json")
            manifest.symlink_to(manifest)  # opening it fails with "too many levels of symbolic links"
            raise KeyError(f"planted at pass {call}")

    def dies_there(self, call: int, row: Tensor) -> None:
        """On the second node of a cluster, the process stops at pass `at`; in the next attempt it ends there."""
        if "ray" not in sys.modules:  # the check on the driver
            return
        here = sys.modules["ray"].util.get_node_ip_address()
        if not self._spoken:
            self._spoken = True
            Path(self._note, f"rank{dist.get_rank()}-{call}").write_text(here)
        if call == self._at and here == "127.0.0.2":
            stopped = Path(self._note, "stopped")
            number = signal.SIGKILL if stopped.exists() else signal.SIGSTOP
            stopped.touch()
            os.kill(os.getpid(), number)

    def runs_short(self, call: int, row: Tensor) -> None:
        if call == self._at:
            short_once(Path(self._note) / "in a pass")

    def overflows_under_autocast(self, call: int, row: Tensor) -> None:
        with open(self._note, "a") as file:
            file.write(json.dumps(row.tolist()) + "\n")
        self._poisoned = call >= self._at and torch.is_autocast_enabled("cpu")


def net(width: int = 16, dropout: float = 0.1, fault: str = "", at: int = 0, note: str = "", pause: float = 0.0) -> Net:
    """The builder."""
    return Troubled(width, dropout, fault=fault, at=at, note=note, pause=pause)


def waiting_net() -> Net:
    """Is never complete in a worker, which therefore never trains."""
    while "ray" in sys.modules and sys.modules["ray"].is_initialized():
        time.sleep(0.05)
    return net()


def short_net(note: str, width: int = 16) -> Any:
    """Rank 1 runs out of memory once in the forward of pass 7, and once behind step 12, where no pass is."""
    from raytrain.trainable import Trainable

    trainable = Trainable.from_module(net(width, dropout=0.0, fault="runs_short", at=7, note=note))

    def between_steps(step: int) -> None:
        if step == 12:
            short_once(Path(note) / "behind a step")

    trainable.between_steps = between_steps
    return trainable


def short_once(mark: Path) -> None:
    """On rank 1 of several, where the mark is not there yet."""
    if dist.is_initialized() and dist.get_rank() == 1 and not mark.exists():
        mark.touch()
        raise torch.OutOfMemoryError("planted: tried to allocate 2.00 GiB")


def gathered_short(width: int = 16) -> Any:
    """Rank 0 runs out of memory when the complete module is gathered."""
    from raytrain.trainable import RemoteState, Trainable

    class Short(RemoteState):
        def gather_module(self, module: Any) -> Any:
            if dist.get_rank() == 0:
                raise torch.OutOfMemoryError("planted: tried to allocate 2.00 GiB")
            return None

    trainable = Trainable.from_module(net(width, dropout=0.0))
    trainable.remote = Short()
    return trainable


def networked(note: str, width: int = 16) -> Any:
    """Appends to a file the network interfaces that this process's collectives are kept on."""
    with open(note, "a") as file:
        file.write(f"{dist.is_initialized()} {os.environ.get('GLOO_SOCKET_IFNAME')} ")
        file.write(f"{os.environ.get('NCCL_SOCKET_IFNAME')}\n")
    return net(width, dropout=0.0)


class Watcher:
    """A good observer that tries to change what it sees."""

    def metrics(self, row: dict[str, Any]) -> None:
        with open(Path(__file__).parent / "watched.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        row["loss"] = -1.0
        row.clear()


class Fragile:
    """A failing observer."""

    def metrics(self, row: dict[str, Any]) -> None:
        raise ValueError("planted in an observer")


class KillsHost:
    """Kills expert hosts of this machine in the middle of the run, once: the oldest, not the stand-by."""

    number = 1

    def metrics(self, row: dict[str, Any]) -> None:
        note = Path(__file__).parent / "host killed"
        if row["kind"] != "train" or row["step"] != 33 or note.exists():
            return
        hosts = []
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                same_cluster = int(fields[1]) == os.getppid()  # the raylet started both
                if same_cluster and b"::ExpertHost" in (entry / "cmdline").read_bytes():
                    hosts.append((int(fields[19]), int(entry.name)))
            except OSError:
                continue
        note.touch()
        for _, pid in sorted(hosts)[: self.number]:
            os.kill(pid, signal.SIGKILL)


class KillsTwoHosts(KillsHost):
    """Two at once."""

    number = 2


class Searched(Net):
    """In training each row takes `row_mib` MiB, three times as much in its backward, and a pass waits; `deadly` rows
    kill it. Lines of `note` are [rows, bytes of the process that are resident before the backward]."""

    def __init__(self, width: int, dropout: float, *, row_mib: float, deadly: int, pause: float, note: str) -> None:
        super().__init__(width, dropout)
        self._values, self._deadly, self._pause, self._note = int(row_mib * 2**18), deadly, pause, note

    def forward(self, x: Tensor, labels: Tensor, row: Tensor) -> dict[str, Tensor]:
        if not self.training:
            return super().forward(x, labels, row)
        time.sleep(self._pause)  # so that a large batch is a fast one
        if len(x) == self._deadly:
            os._exit(9)
        scores = self.layers(x).float()
        kept = scores[:, :1].expand(-1, self._values).relu()  # cheap: the pause is most of a pass
        if self._note:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            with open(self._note, "a") as file:
                file.write(json.dumps([len(x), resident]) + "\n")
        return {"loss": F.cross_entropy(scores, labels) + 0.0 * kept.mean()}


def searched(
    width: int = 16, dropout: float = 0.1, row_mib: float = 0.0, deadly: int = 0, pause: float = 0.0, note: str = ""
) -> Searched:
    """The builder of what a search measures."""
    return Searched(width, dropout, row_mib=row_mib, deadly=deadly, pause=pause, note=note)


class Paces:
    """Holds a run at the step that the file `$PACED` names, so that a test can break it there."""

    def metrics(self, row: dict[str, Any]) -> None:
        while row["step"] > int(Path(os.environ["PACED"]).read_text()):
            time.sleep(0.05)


class FallsOnce:
    """Holds rank 0 at step 6 until there is a file `$FALL`, and then kills it, once."""

    def metrics(self, row: dict[str, Any]) -> None:
        fall = Path(os.environ["FALL"])
        fallen = fall.with_suffix(".done")
        if row["kind"] != "train" or row["step"] != 6 or fallen.exists():
            return
        while not fall.exists():
            time.sleep(0.05)
        fallen.touch()
        os.kill(os.getpid(), signal.SIGKILL)
