"""State and computation of a model in other processes, as the loop meets them; who they are raytrain does not know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from raytrain.train.memory.oom import Shortage
from raytrain.train.parallel.collectives import WorkersGroup
from raytrain.train.parallel.interleave import Turns

Notice = tuple[str, dict[str, Any]]
"""(kind, fields) of an event."""


@dataclass(frozen=True)
class Death:
    """A process that held state and is no more.

    Attributes:
        who: as people call it.
        node, pid: where it was; empty and None where it never stood.
        time: when that was noticed, in unix seconds.
        why: in the words of who noticed.
    """

    who: str
    node: str
    pid: int | None
    time: float
    why: str

    @property
    def title(self) -> str:
        """Who and where, in one line."""
        where = f" on {self.node}" if self.node else ""
        return f"{self.who}{where}{f' (pid {self.pid})' if self.pid else ''}"


class SavedElsewhere(Protocol):
    """State that other processes write into a checkpoint's directory beside rank 0."""

    def begin_save(self, step: int) -> None:
        """Have it snapshotted as it is after `step`; its owners write it in the background. All workers call it."""
        ...

    def finish_save(self, folder: str) -> dict[str, Any]:
        """Wait for them: {"files": name -> WrittenFile, and more for the manifest}. Rank 0's writer calls it.

        Raises:
            RunError: one could not write.
        """
        ...


class StateElsewhere(SavedElsewhere, Protocol):
    """Every call is one of all workers, but for `finish_save`, which rank 0's writer makes, and those that say so.

    Attributes:
        note: what is different about where it lives since the time before, for the record; mostly nothing.
        deaths: who has died since the last step that was committed and before this came to be, in order.
        workers_group: where the workers' own group must end together with theirs; None = torch's default group.
        turns: given away in every pass before it waits for other processes, so that two passes can take turns.
    """

    note: str
    deaths: list[Death]
    workers_group: WorkersGroup | None
    turns: Turns

    def waited_s(self) -> float:
        """Seconds that this worker has spent waiting for them, so far; no collective."""
        ...

    def notices(self) -> list[Notice]:
        """What has happened since the last call, for `events.jsonl`; asked after each step, no collective. After the
        first step a "death" for each of `deaths`, with the seconds that it took."""
        ...

    def idle(self) -> Tensor:
        """Take part in a micro-batch of other workers, without rows; a scalar zero to call backward on."""
        ...

    def end_passes(self, *, short: bool) -> None:
        """This worker's passes of a step or of an evaluation are over. Where `short`, before their end: it had no
        memory for them, and those of the others go on without it until `discard`."""
        ...

    def shortages(self) -> list[Shortage]:
        """Which of the other processes had no memory for an evaluation; with a step they say so in `agree`."""
        ...

    def discard(self) -> None:
        """Forget what passes without a step have left behind: gradients and counts."""
        ...

    def whole(self) -> nn.Module | None:
        """The module with everything that lives elsewhere, on rank 0 (None on the others); the end of training."""
        ...

    def restore(self, folder: str, *, step: int) -> None:
        """Have it loaded from a checkpoint. Raises CheckpointError, at the latest with the next step."""
        ...
