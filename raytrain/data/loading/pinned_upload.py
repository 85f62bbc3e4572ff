"""Copies to a GPU beside its work: a thread gathers and pins, a stream of its own copies, the step waits for that."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from raytrain.data.transfer import tensors_of

Made = TypeVar("Made")

#: Batches on the device beside the one in use.
UPLOAD_DEPTH = 2


class BatchUploader(Generic[Made]):
    """One thread and one stream; the host never waits for a copy. On a CPU there is the thread alone.

    Args:
        device: where batches go.
        parts: the tensors of what is made, as a nested value.
    """

    def __init__(self, device: torch.device, *, parts: Callable[[Made], Any]) -> None:
        self._device, self._parts = device, parts
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")

    def begin(self, make: Callable[[], Made], unwanted: Callable[[], object] = lambda: None) -> PendingUpload[Made]:
        """Make a batch in the thread; its copies and kernels go to the stream. `unwanted` is called where it is
        cancelled before that began."""
        return PendingUpload(self._thread.submit(self._made, make), self._stream, parts=self._parts, unwanted=unwanted)

    def _made(self, make: Callable[[], Made]) -> tuple[Made, torch.Event | None]:
        if self._stream is None:
            return make(), None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            made = make()
            return made, self._stream.record_event()

    def close(self) -> None:
        """End the thread; what was not begun is left."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class PendingUpload(Generic[Made]):
    """A batch on its way."""

    def __init__(
        self,
        future: Future[tuple[Made, torch.Event | None]],
        stream: torch.cuda.Stream | None,
        *,
        parts: Callable[[Made], Any],
        unwanted: Callable[[], object],
    ) -> None:
        self._future, self._stream, self._parts, self._unwanted = future, stream, parts, unwanted

    def result(self) -> Made:
        """The batch; kernels queued from now on wait for its copies, the host does not."""
        made, copied = self._future.result()
        if copied is not None:
            current = torch.cuda.current_stream()
            current.wait_event(copied)
            for _, tensor in tensors_of(self._parts(made), ""):
                tensor.record_stream(current)  # its memory belongs to the other stream
        return made

    def cancel(self) -> None:
        """Nobody wants it: not begun where it was not."""
        if self._future.cancel():
            self._unwanted()
