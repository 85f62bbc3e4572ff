"""Parts of a model that run compiled, what became of each, and the way back to eager.

Each part's `forward` is replaced; weights, names and hooks stay as they are. Shapes are dynamic from the first
compilation on, so that one kernel serves every size of a batch: a resumed run meets the same kernels as an unbroken
one, whatever sizes came first. Whatever the compiler cannot do runs eager: a graph that its backend refuses runs as it
was traced, a frame that cannot be traced runs as it was written; either way nothing has been computed twice, and the
reason is kept.

Torch keeps compiled code by code object and backend, for the life of the process: equal blocks share it, and so does a
session that follows another after a rollback.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from raytrain.errors import first_line

Lower = Callable[[Any, list[Any]], Callable[..., Any]]
"""A graph and example inputs in, something that computes the same out."""

#: Precisions that a start compares, training and evaluation, and batches of one row each have a variant of their own;
#: torch's own limit of 8 would quietly end in eager code.
VARIANTS_AT_MOST = 64
#: Reasons that a record lists of each kind.
LISTED_AT_MOST = 5


@dataclass
class PartStatus:
    """What became of one part of the model.

    Attributes:
        name, kind: in the model ("" is the whole of it), and its class.
        entered: how often it was called. calls: of its compiled graphs.
        graphs: compiled while this part was called; equal parts share the first one's.
        graph_breaks, recompiles: likewise; a batch of one row, evaluation and another precision recompile once each.
        seconds: spent in the compiler.
        reason: why (some of) it runs eager; "" where nothing failed.
        frames, breaks_at: what all parts have compiled, and where graphs broke, one object for them all.
    """

    name: str
    kind: str
    frames: set[str] = field(default_factory=set)
    breaks_at: dict[str, int] = field(default_factory=dict)
    entered: int = 0
    calls: int = 0
    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    seconds: float = 0.0
    reason: str = ""

    @property
    def achieved(self) -> str:
        """ "compiled", "partly" (some graphs or frames run eager), "eager", or "not run"."""
        if self.calls:
            return "partly" if self.reason else "compiled"
        return "eager" if self.entered else "not run"

    @property
    def why(self) -> str:
        """Why not all of it is compiled; "" where it is, or was not called yet."""
        if self.reason or self.achieved != "eager":
            return self.reason
        return f"nothing in it could be traced: {', '.join(list(self.breaks_at)[:1]) or 'torch says no more'}"

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        counts = {name: getattr(self, name) for name in ("graphs", "graph_breaks", "recompiles")}
        return {"name": self.name or "model", "kind": self.kind, "achieved": self.achieved, **counts,
                "seconds": self.seconds, "reason": self.why}  # fmt: skip


@dataclass
class _Here(threading.local):
    """The part that this thread is in."""

    part: PartStatus | None = None
    began: float = 0.0
    breaks: dict[str, int] = field(default_factory=dict)
    failing: BaseException | None = None


_HERE = _Here()


class CompiledParts:
    """Compiles parts of a module in place, and knows what became of them.

    Args:
        parts: (name, module); none inside another.
        mode: `loop.compile`, not "off".
        lower: a backend in place of torch's inductor (tests).
    """

    def __init__(self, parts: Sequence[tuple[str, nn.Module]], *, mode: str, lower: Lower | None = None) -> None:
        self.mode = mode
        frames, self._breaks_at = set[str](), dict[str, int]()
        self.parts = [PartStatus(name, type(part).__name__, frames, self._breaks_at) for name, part in parts]
        self._forwards: list[tuple[nn.Module, Any]] = []
        self._taken = 0.0
        self._told: tuple[Any, ...] = ()
        _watch()
        backend = _backend(mode, lower)
        for status, (_, part) in zip(self.parts, parts, strict=True):
            _keep_eager(part)
            self._forwards.append((part, part.__dict__.get("forward")))
            compiled = torch.compile(part.forward, backend=backend, dynamic=True)
            part.forward = _Compiled(status, compiled)  # type: ignore[method-assign]

    def off(self) -> None:
        """Every part as it was before; what was compiled stays counted."""
        for part, before in self._forwards:
            if before is None:
                part.__dict__.pop("forward", None)
            else:
                part.forward = before
        self._forwards = []

    @property
    def seconds(self) -> float:
        """Spent in the compiler so far."""
        return sum(part.seconds for part in self.parts)

    def take_seconds(self) -> float:
        """Spent in the compiler since the last call."""
        spent, self._taken = self.seconds - self._taken, self.seconds
        return spent

    def news(self) -> dict[str, Any] | None:
        """`status` where it differs from the last time, beyond what is counted at each call."""
        now = tuple((part.achieved, part.graphs, part.graph_breaks, part.reason) for part in self.parts)
        if now == self._told:
            return None
        self._told = now
        return self.status()

    def status(self) -> dict[str, Any]:
        """The record: requested mode, totals, and each part."""
        achieved = [part.achieved for part in self.parts]
        totals = {name: sum(getattr(part, name) for part in self.parts)
                  for name in ("graphs", "graph_breaks", "recompiles")}  # fmt: skip
        reasons = list(dict.fromkeys(part.why for part in self.parts if part.why))
        return {
            "requested": self.mode,
            "achieved": f"{achieved.count('compiled')} of {len(achieved)} parts",
            **totals,
            "seconds": self.seconds,
            "reasons": reasons[:LISTED_AT_MOST],
            "breaks_at": list(self._breaks_at)[:LISTED_AT_MOST],
            "parts": [part.to_json() for part in self.parts],
        }


def _keep_eager(part: nn.Module) -> None:
    """Methods that a module inside names in a tuple `never_compiled` run as they are written."""
    for inner in part.modules():
        for name in getattr(inner, "never_compiled", ()):
            setattr(inner, name, torch.compiler.disable(getattr(inner, name)))


class _Compiled:
    """A part's forward that says where it is while it runs."""

    def __init__(self, status: PartStatus, forward: Callable[..., Any]) -> None:
        self._status, self._forward = status, forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        before, _HERE.part = _HERE.part, self._status
        self._status.entered += 1
        try:
            return self._forward(*inputs, **named)
        finally:
            _HERE.part = before


@dataclass
class _Graph:
    """One compiled graph, or the traced one in its place."""

    run: Callable[..., Any]
    failed: str = ""

    def __call__(self, *inputs: Any) -> Any:
        part = _HERE.part
        if part is not None:
            part.calls += not self.failed
            part.reason = part.reason or self.failed
        return self.run(*inputs)


@functools.cache
def _backend(mode: str, lower: Lower | None) -> Callable[[Any, list[Any]], Callable[..., Any]]:
    """The backend of a mode, one for the life of the process: torch asks for the same object before it shares code."""
    from torch._dynamo.exc import RestartAnalysis
    from torch._functorch import config as autograd_config

    chosen: Any = lower or torch._TorchCompileInductorWrapper(mode, None, True)

    def backend(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        """Compiles forward and backward now, so that a failure of either is found before anything has run."""
        try:
            with autograd_config.patch(force_non_lazy_backward_lowering=True):
                made = _Graph(chosen(graph, inputs))
        except RestartAnalysis:  # torch's own way to trace once more
            raise
        except Exception as error:  # whatever a compiler raises, the traced graph computes the same
            made = _Graph(graph.forward, failed=_named(error))
        if _HERE.part is not None:
            _HERE.part.graphs += not made.failed
            _HERE.part.reason = _HERE.part.reason or made.failed
        return lambda *values: made(*values)

    return backend


def _named(error: BaseException) -> str:
    cause: BaseException = getattr(error, "inner_exception", None) or error
    return f"{type(cause).__name__}: {first_line(cause)}"


# -- what torch tells of its work ------------------------------------------------------------------


def _watch() -> None:
    """From now on, in this process: frames that cannot be traced run as written, and what the compiler does is noted
    with the part that it does it for. Once is enough, until somebody resets torch's compiler."""
    import torch._dynamo.config
    from torch._dynamo.callback import callback_handler

    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = VARIANTS_AT_MOST
    if _started not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_started)
        callback_handler.register_end_callback(_ended)


def _started(_about: Any) -> None:
    _HERE.began, _HERE.breaks, _HERE.failing = time.perf_counter(), _breaks(), sys.exc_info()[1]


def _ended(about: Any) -> None:
    part, error = _HERE.part, sys.exc_info()[1]
    if part is None:  # somebody else's
        return
    part.seconds += time.perf_counter() - _HERE.began
    for reason, count in _breaks().items():
        more = count - _HERE.breaks.get(reason, 0)
        if more:
            part.graph_breaks += more
            part.breaks_at[reason] = part.breaks_at.get(reason, 0) + more
    frame = str(about.compile_id).rpartition("/")[0]
    part.recompiles += frame in part.frames
    part.frames.add(frame)
    if error is not None and error is not _HERE.failing and not _is_break(error):
        part.reason = part.reason or _named(error)


def _is_break(error: BaseException) -> bool:
    """What ends a graph where Python has to go on, and is counted as such."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame, Unsupported

    return isinstance(error, RestartAnalysis | SkipFrame | Unsupported)


def _breaks() -> dict[str, int]:
    import torch._dynamo.utils

    return {reason.partition("\n")[0]: n for reason, n in torch._dynamo.utils.counters["graph_break"].items()}
