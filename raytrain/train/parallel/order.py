"""The order in which the workers gather and sum the blocks of a sharded model, which must be the same on all of them.

A collective pairs whatever the workers call next. Where one gathers a block and another a different one, each computes
with the weights of both, without an error if the blocks have the same size, and else gloo ends the process. So a worker
compares with the others before it calls, but only in the first pass of each kind (an exchange takes as long as the
gathering of a small block): that pass is the reference, which every worker knows, and following it costs a comparison
in Python. One that leaves the reference asks the others again. Where all of them leave it alike, as with random layers
by a shared seed, their order is the next reference.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from raytrain.errors import RunError, lost_in, message_of
from raytrain.train.parallel.collectives import Workers

PATIENCE_S = 60.0
SHARDED_RULE = (
    "scale.strategy: fsdp needs one order of blocks on all workers; does a branch on the rows, a random draw or a list"
    " of experts choose the blocks? Call every block on every worker, or use scale.strategy data_parallel"
)
NORMS_RULE = (
    "scale.sync_batchnorm needs one order of batch norms on all workers; does a branch on the rows choose them? Call"
    " every one on every worker, or use scale.sync_batchnorm false"
)
GATHER, SUM = "gathers", "sums the gradients of"
_END = -1
_TIMED_OUT = ("timed out", "timeout")


class BlockOrder:
    """Compares the collectives of each pass with those of the other workers. All workers create it together.

    Args:
        rule: what is needed, and what to do, separated by "; ".
        patience_s: how long a worker that leaves the reference waits for the others to leave it too; less where the
            process group itself waits for less.
    """

    def __init__(
        self, workers: Workers, *, device: torch.device, patience_s: float = PATIENCE_S, rule: str = SHARDED_RULE
    ) -> None:
        self._rule = rule
        self._workers = workers
        self._group: Any = None
        self._patience_s = patience_s
        if workers.world_size > 1:
            limit: timedelta = dist.group.WORLD._get_backend(device).options._timeout  # pyright: ignore
            self._group = dist.new_group(backend="gloo", timeout=limit)
            self._patience_s = min(patience_s, limit.total_seconds() / 2)
        self._calls: list[str] = []
        self._known: dict[bool, list[int]] = {}  # by whether gradients are computed
        self._open: bool | None = None
        self._passes = 0
        self._reference: list[int] | None = None
        self._seen: list[int] = []

    def call_of(self, part: str, verb: str) -> int:
        """The number of a collective of one part, for `meet`; every worker asks for them in the same order."""
        self._calls.append(f"{verb} {part or 'what is outside the blocks'}")
        return len(self._calls) - 1

    def begin(self) -> None:
        """Begin a pass, and end the one before."""
        self.end()
        self._open = torch.is_grad_enabled()
        self._passes += 1
        self._reference = self._known.get(self._open)

    def end(self) -> None:
        """End the pass, if there is one: other workers may have gone on with it. Raises RunError as `meet` does."""
        if self._open is None:
            return
        self.meet(_END)
        if self._reference is None:
            self._known[self._open] = self._seen
        self._open, self._reference, self._seen = None, None, []

    def meet(self, call: int) -> None:
        """Called before each collective of a pass. Raises RunError: another worker calls something else, or does not
        answer."""
        at = len(self._seen)
        self._seen.append(call)
        reference = self._reference
        if reference is not None and at < len(reference) and reference[at] == call:
            return
        if self._group is not None:
            self._compare(at, call)
        self._reference = None

    def _compare(self, at: int, call: int) -> None:
        own = torch.tensor([self._passes, at, call])
        rows = [torch.empty_like(own) for _ in range(self._workers.world_size)]
        options = AllgatherOptions()
        if self._reference is not None:
            options.timeout = timedelta(seconds=self._patience_s)
        try:
            self._group.allgather([rows], [own], options).wait()
        except RuntimeError as error:
            left = self._reference is not None and any(words in message_of(error).lower() for words in _TIMED_OUT)
            if not left:
                raise lost_in(f"a collective of {self._workers.world_size} workers inside a pass", error) from error
            before = self._reference[at] if at < len(self._reference or ()) else _END  # pyright: ignore
            raise self._refused(
                f"rank {self._workers.rank} {self._words(call)} where it {self._words(before)} in other passes, and"
                f" another worker did not answer for {self._patience_s:.0f} s"
            ) from error
        found = [tuple(int(value) for value in row.numpy()) for row in rows]
        other = next((rank for rank, row in enumerate(found) if row != found[0]), None)
        if other is not None:
            raise self._refused(
                f"rank 0 {self._words(found[0][-1])} where rank {other} {self._words(found[other][-1])}"
            )

    def _words(self, call: int) -> str:
        return "ends the pass" if call == _END else self._calls[call]

    def _refused(self, seen: str) -> RunError:
        needs, _, remedy = self._rule.partition("; ")
        return RunError(f"{needs}, but in pass {self._passes} {seen}; {remedy}")
