"""`raytrain bench peers` without the peers, and how it holds another library's loop between blocks."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.bench import loop, peers
from jobs.bench.harness.options import bench_verb
from jobs.bench.loop import gpt_loop
from jobs.bench.peers import StepObserver


def test_without_the_peers_nothing_starts_and_the_claim_names_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench_verb("peers", [], out=str(tmp_path / "peers.json"), quick=False, as_json=False) == 0
    (claim,) = json.loads((tmp_path / "peers.json").read_text())["claims"]
    assert claim["verdict"] == "not measurable here" and "raytrain[peers]" in claim["evidence"]
    assert "lightning or of accelerate" in claim["effect"]
    assert "not measurable here" in capsys.readouterr().out


@pytest.fixture
def answers_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """`answers_of(train, *steps)` calls `train` while the bench asks for blocks of these steps, then for none; returns
    the answers."""

    def asked(train: Callable[[], object], *steps: int) -> list[dict[str, Any]]:
        bench, process = Pipe()
        monkeypatch.setattr(loop, "connect", lambda: process)
        for one in (*steps, 0):
            bench.send({"steps": one})
        train()
        assert process.closed
        return [bench.recv() for _ in steps]

    return asked


def test_a_block_ends_after_its_steps_with_the_first_and_every_tenth_loss_and_zero_steps_end_the_loop(
    answers_of: Callable[..., list[dict[str, Any]]],
) -> None:
    trained = []

    def train() -> None:
        observer = StepObserver()
        observer.begin()
        while not observer.over:
            trained.append(len(trained) + 1)
            observer.end_step(torch.tensor(float(trained[-1])))

    answers = answers_of(train, 20, 10)
    assert trained[-1] == 30
    assert [answer["losses"] for answer in answers] == [[1.0, 10.0, 20.0], [30.0]]
    assert all(answer["seconds"] > 0 for answer in answers)


@pytest.mark.filterwarnings("ignore")  # warnings of the peers
@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_each_loop_trains_the_steps_of_the_plain_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers_of: Callable[..., list[dict[str, Any]]]
) -> None:
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(bytes(range(97, 123)) * 200)
    settings = {"layers": 1, "heads": 2, "width": 16, "context": 8, "batch": 4, "seed": 3, "max_steps": 40,
                "text": "text.txt", "threads": torch.get_num_threads()}  # fmt: skip
    reference = gpt_loop(settings, clip="torch", rank=0, world_size=1).run(30)
    answers = answers_of(lambda: getattr(peers, name)(settings, 0), 20, 10)
    losses = [loss for answer in answers for loss in answer["losses"]]
    assert losses == pytest.approx(reference, rel=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"], "the bench runs it in the user's folder"
