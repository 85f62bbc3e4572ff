"""Two passes that take turns: one computes while what the other sent is on its way.

A pass that would wait for somebody else gives the turn to the other before it waits, and goes on when the turn comes
back, in strict alternation. The order of everything that both do is then a pure function of the two passes, the same
in every process that runs the same two, though each pass has a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")


class PassEnded(Exception):
    """The other pass failed, and this one must end with it."""


class Interleaver:
    """The turn of one process. Only the pass that has it runs, so nobody has to say who asks.

    The turn belongs to a pass and not to a thread: on a GPU autograd runs a backward pass in threads of its own.
    """

    def __init__(self) -> None:
        self._going = [False, False]
        self._turn = 0
        self._failed = False
        self._wake: list[threading.Semaphore] = []
        self._thread: ThreadPoolExecutor | None = None

    def yield_turn(self) -> None:
        """Let the other pass compute until it gives the turn back or ends; nothing where there is no other.

        Raises:
            PassEnded: the other failed meanwhile.
        """
        mine, other = self._turn, 1 - self._turn
        if self._going[other]:
            self._turn = other
            self._wake[other].release()
            self._wake[mine].acquire()
        if self._failed:
            raise PassEnded("the pass beside this one failed")

    def run_interleaved(self, first: Callable[[], Any], second: Callable[[], Made]) -> Made:
        """Run `first` in a thread of its own and `second` in the caller's, in turns; `first` begins.

        Returns:
            What `second` returned, when both have ended.

        Raises:
            BaseException: what the pass that failed first raised; the other has been ended at its next turn.
        """
        if self._thread is None:  # a thread takes over the number of threads it computes with when it first asks for it
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="turns", initializer=torch.get_num_threads)
        self._going, self._turn, self._failed = [True, True], 0, False
        self._wake = [threading.Semaphore(1), threading.Semaphore(0)]
        began = self._thread.submit(self._run, 0, first)
        try:
            made = self._run(1, second)
        except PassEnded:
            began.result()
            raise
        except BaseException:
            wait([began])
            raise
        else:
            began.result()  # it may fail when the other has long come through
            return made
        finally:
            self._failed = False

    def _run(self, mine: int, work: Callable[[], Made]) -> Made:
        try:
            self._wake[mine].acquire()
            if self._failed:
                raise PassEnded("the pass beside this one failed")
            return work()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._going[mine], self._turn = False, 1 - mine
            self._wake[1 - mine].release()
