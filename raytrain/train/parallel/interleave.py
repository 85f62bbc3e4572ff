"""Interleaves two passes: one computes while the messages of the other are in transit.

A pass yields its turn to the other before it waits for another process, and continues when the turn comes back, in
strict alternation. Although each pass has its own thread, the order of all operations depends only on the two passes,
so it is the same in every process that runs the same two.

On a GPU both passes use one stream. A pass queues its wait for a message only when it has the turn again, behind the
products of the other pass: the message travels meanwhile, on a stream of the process group. A stream for each pass
would add nothing but products of both at the same time, and two streams that add to the same gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


class PassEnded(Exception):
    """The other pass failed, so this one must end too."""


class Interleaver:
    """Alternates two passes in one process. Only the pass that has the turn runs, so calls need not identify it.

    The turn belongs to a pass, not to a thread: on a GPU, autograd runs a backward pass in its own threads.
    """

    def __init__(self) -> None:
        self._going = [False, False]
        self._turn = 0
        self._failed = False
        self._wake: list[threading.Semaphore] = []
        self._thread: ThreadPoolExecutor | None = None

    def yield_turn(self) -> None:
        """Let the other pass run until it yields or ends; a no-op if there is none.

        Raises:
            PassEnded: the other pass has failed.
        """
        mine, other = self._turn, 1 - self._turn
        if self._going[other]:
            self._turn = other
            self._wake[other].release()
            self._wake[mine].acquire()
        if self._failed:
            raise PassEnded("the other of two interleaved passes failed")

    def run_interleaved(self, first: Callable[[], Any], second: Callable[[], Made]) -> Made:
        """Run `first` in another thread and `second` in the caller's, alternating; `first` starts.

        Returns:
            The result of `second`, after both have ended.

        Raises:
            BaseException: the exception of the pass that failed first; the other pass ends at its next turn.
        """
        if self._thread is None:  # get_num_threads makes the new thread adopt torch's thread count
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="interleaved", initializer=torch.get_num_threads)
        self._going, self._turn, self._failed = [True, True], 0, False
        self._wake = [threading.Semaphore(1), threading.Semaphore(0)]
        running = self._thread.submit(self._run, 0, first)
        try:
            result = self._run(1, second)
        except PassEnded:
            running.result()
            raise
        except BaseException:
            wait([running])
            raise
        else:
            running.result()  # `first` may fail after `second` has ended
            return result
        finally:
            self._failed = False

    def _run(self, mine: int, work: Callable[[], Made]) -> Made:
        try:
            self._wake[mine].acquire()
            if self._failed:
                raise PassEnded("the other of two interleaved passes failed")
            return work()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._going[mine], self._turn = False, 1 - mine
            self._wake[1 - mine].release()
