"""Exclusive creation, on which the numbers of attempts rest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raytrain.runs.folder import RunFolder, this_process
from raytrain.runs.storage import LocalStore, open_store


def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("links", [True, False])
def test_an_existing_file_is_never_replaced(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        no_links(monkeypatch)
    store = LocalStore(str(tmp_path))
    assert store.create_exclusive("a/one", b"first")
    assert not store.create_exclusive("a/one", b"second")
    assert store.read_bytes("a/one") == b"first" and [entry.name for entry in store.entries("a")] == ["one"]


def test_an_object_that_exists_is_never_replaced(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/objects")
    assert store.create_exclusive("one", b"first") and not store.create_exclusive("one", b"second")
    assert store.read_bytes("one") == b"first"


@pytest.mark.parametrize("links", [True, False])
def test_of_many_at_once_one_creates_the_file(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        no_links(monkeypatch)
    store = LocalStore(str(tmp_path))
    made = at_once(8, lambda number: store.create_exclusive("one", b"%d" % number))
    assert sum(made) == 1 and store.read_bytes("one") == b"%d" % made.index(True)


def test_on_an_object_store_a_claim_that_another_has_overwritten_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that the number is free: the later write has it, and the earlier takes the next."""
    path = f"file://{tmp_path}/runs/a"
    ours, theirs = RunFolder(path), RunFolder(path)
    monkeypatch.setattr("raytrain.runs.folder.time.time", lambda: 1000.0)  # records that differ by their nonce alone
    numbers: list[int] = []
    write, free = ours.store.write_bytes, theirs.store.exists

    def overtaken(name: str, data: bytes) -> None:
        write(name, data)
        if name.endswith("0001.json") and not numbers:
            monkeypatch.setattr(theirs.store, "exists", lambda asked: asked != name and free(asked))
            monkeypatch.setattr(theirs.store, "entries", lambda _folder: [])  # it looked before our write
            numbers.append(theirs.next_attempt(this_process()))

    monkeypatch.setattr(ours.store, "write_bytes", overtaken)
    assert (ours.next_attempt(this_process()), numbers) == (2, [1])


def test_attempts_that_are_claimed_at_once_have_different_numbers(tmp_path: Path) -> None:
    path = RunFolder.create(str(tmp_path), "run").path
    numbers = at_once(8, lambda number: RunFolder(path).next_attempt({**this_process(), "pid": number}))
    assert sorted(numbers) == list(range(1, 9))
    for pid, number in enumerate(numbers):
        owner = RunFolder(path).owner_of(number)
        assert owner is not None and owner["pid"] == pid


def at_once(number: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of `work(0)`, `work(1)`, ..., started together."""
    results: list[Any] = [None] * number
    barrier = threading.Barrier(number)

    def run(index: int) -> None:
        barrier.wait()
        results[index] = work(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
