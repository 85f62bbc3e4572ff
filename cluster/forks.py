"""Forks of a process that is connected to Ray: the child leaves what belongs to its parent alone.

Objects of Ray call Ray when they are deleted. In a forked child such a call goes through the connections of the parent,
which then waits forever for answers that the child has read. Objects that refer to each other in a circle are deleted
by Python's garbage collector, in whichever process it runs first.
"""

from __future__ import annotations

import gc
import os


class _Forks:
    """The handlers of `os.register_at_fork`; the collector is off while a thread forks."""

    def __init__(self) -> None:
        self._forking, self._enabled = 0, True

    def before(self) -> None:
        if not self._forking:
            self._enabled = gc.isenabled()
        self._forking += 1
        gc.disable()

    def in_parent(self) -> None:
        self._forking -= 1
        if not self._forking and self._enabled:
            gc.enable()

    def in_child(self) -> None:
        gc.freeze()
        self._forking = 0
        if self._enabled:
            gc.enable()


_forks: list[_Forks] = []


def keep_parents_objects() -> None:
    """From now on no child that this process forks deletes objects of this process by garbage collection."""
    if not _forks:
        _forks.append(_Forks())
        os.register_at_fork(
            before=_forks[0].before, after_in_parent=_forks[0].in_parent, after_in_child=_forks[0].in_child
        )
