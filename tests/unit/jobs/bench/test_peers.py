"""`raytrain bench peers` without the peers, and the timer of blocks in another library's loop."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.bench.harness.options import bench_verb
from jobs.bench.peers import StepTimer


def test_without_the_peers_nothing_starts_and_the_claim_names_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench_verb("peers", [], out=str(tmp_path / "peers.json"), quick=False, as_json=False) == 0
    (claim,) = json.loads((tmp_path / "peers.json").read_text())["claims"]
    assert claim["verdict"] == "not measurable here" and "raytrain[peers]" in claim["evidence"]
    assert "lightning or of accelerate" in claim["effect"]
    assert "not measurable here" in capsys.readouterr().out


class FakeConnection:
    """A connection that requests blocks of these steps and records the answers."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.answers = list(steps), []

    def poll(self, timeout: float | None) -> bool:
        return True

    def recv(self) -> dict[str, Any]:
        return {"steps": self.steps.pop(0)}

    def send(self, message: dict[str, Any]) -> None:
        self.answers.append(message)

    def close(self) -> None:
        self.steps.append(-1)


def test_a_block_ends_after_its_steps_with_the_first_and_every_tenth_loss_and_zero_steps_end_the_loop() -> None:
    connection = FakeConnection(20, 10, 0)
    timer = StepTimer(connection)  # type: ignore[arg-type]
    steps = 0
    while not timer.over:
        steps += 1
        timer.end_step(torch.tensor(float(steps)))
    assert steps == 30 and connection.steps == [-1], "closed, and not read again"
    assert [answer["losses"] for answer in connection.answers] == [[1.0, 10.0, 20.0], [30.0]]
    assert all(answer["seconds"] > 0 for answer in connection.answers)


@pytest.mark.filterwarnings("ignore")  # warnings of the peers
@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_each_loop_trains_the_steps_of_the_plain_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    from jobs.bench import peers
    from jobs.bench.loop import gpt_loop

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(bytes(range(97, 123)) * 200)
    settings = {"layers": 1, "heads": 2, "width": 16, "context": 8, "batch": 4, "seed": 3, "max_steps": 40,
                "text": "text.txt"}  # fmt: skip
    reference = gpt_loop(settings, clip="torch", rank=0, world_size=1).run(30)
    connection = FakeConnection(20, 10, 0)
    loop = gpt_loop(settings, clip="torch", rank=0, world_size=1)
    getattr(peers, name)(loop, lambda: StepTimer(connection))  # type: ignore[arg-type]
    losses = [loss for answer in connection.answers for loss in answer["losses"]]
    assert losses == pytest.approx(reference, rel=1e-6)
