"""Copy batches to a GPU while it computes: a thread gathers and pins them, and a separate CUDA stream copies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from raytrain.data.transfer import tensors_of

Made = TypeVar("Made")

#: Batches on the device in addition to the one in use.
UPLOAD_DEPTH = 2


class BatchUploader(Generic[Made]):
    """One thread and one CUDA stream; the host never waits for a copy. On a CPU there is only the thread.

    Args:
        device: where batches go.
        parts: from what is made to its tensors, as a nested value.
    """

    def __init__(self, device: torch.device, *, parts: Callable[[Made], Any]) -> None:
        self._device, self._parts = device, parts
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")

    def begin(self, make: Callable[[], Made], unwanted: Callable[[], object] = lambda: None) -> PendingUpload[Made]:
        """Make a batch in the thread; its copies and kernels go to the stream. `unwanted` is called if the batch is
        cancelled before the thread starts on it."""
        return PendingUpload(self._thread.submit(self._made, make), self._stream, parts=self._parts, unwanted=unwanted)

    def _made(self, make: Callable[[], Made]) -> tuple[Made, torch.Event | None]:
        if self._stream is None:
            return make(), None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            made = make()
            return made, self._stream.record_event()

    def close(self) -> None:
        """End the thread; batches that it has not started on are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class PendingUpload(Generic[Made]):
    """A batch that is being copied."""

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
        """The batch. Kernels that are queued from now on wait for its copies; the host does not."""
        made, copied = self._future.result()
        if copied is not None:
            current = torch.cuda.current_stream()
            current.wait_event(copied)
            for _, tensor in tensors_of(self._parts(made), ""):
                tensor.record_stream(current)  # its memory belongs to the other stream
        return made

    def cancel(self) -> None:
        """Give the batch up; it is not made if the thread has not started on it."""
        if self._future.cancel():
            self._unwanted()
