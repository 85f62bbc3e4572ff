"""Experts on Ray actors, in a real run: trained as in one process; a host that is killed costs seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cluster.wording import counted

Job = Callable[..., dict[str, Any]]


def moe_job(guest_job: Job, text: Path, **sections: Any) -> dict[str, Any]:
    """A small mixture-of-experts GPT on a text file, every step logged."""
    job = guest_job(**{"loop": {"max_steps": 12, "eval_every": 6, "global_batch_size": 8}, **sections})
    job["model"] = {"builder": "experts.models:moe_gpt", "layers": 2, "heads": 2, "width": 32, "context": 16}
    job["data"] = {"source": "text", "path": str(text)}
    return job


def long_job(
    guest_job: Job, text: Path, name: str, *, hosts: int = 2, kills: str | None = None, **sections: Any
) -> dict[str, Any]:
    """40 steps with a checkpoint every 5, in which an observer of `guest_code` kills hosts."""
    loop = {"max_steps": 40, "eval_every": 20, "global_batch_size": 8}
    job = moe_job(guest_job, text, loop=loop, experts={"hosts": hosts}, save={"every": 5}, **sections)
    return {**job, "name": name, "telemetry": {"observers": [f"guest_code:{kills}"]} if kills else {}}


@pytest.mark.daily
@pytest.mark.timeout(400)
@pytest.mark.covers("EXP-01", "EXP-08")
def test_killed_hosts_cost_seconds_and_the_series_is_that_of_an_unbroken_run(
    fit: Callable[..., Any], run_cli: Callable[..., Any], guest_job: Job, place: Any, tiny_text: Path
) -> None:
    unbroken = fit(long_job(guest_job, tiny_text, "unbroken"))
    broken_job = str(place.write(long_job(guest_job, tiny_text, "broken", kills="KillsTwoHosts")))
    finished = run_cli("train", broken_job, cwd=place.folder, env=place.env, timeout=240)
    assert finished.code == 0, finished.text
    broken = place.run
    assert (place.folder / "host killed").exists()
    assert broken.result["status"] == "done"
    assert broken.losses() == unbroken.losses() and len(broken.losses()) == 40
    assert broken.evals() == unbroken.evals()
    *_, rewind = [row for row in broken.events("decision") if row["what"] == "rewind"]
    assert rewind["seconds"] > 0 and rewind["value"] % 5 == 0
    deaths = broken.events("death")
    assert (
        sorted(row["who"] for row in deaths)
        == ["expert host 0", "expert host 1"]
        == sorted(row["who"] for row in rewind["died"])
    )
    assert all(f"{row['who']} died" in rewind["reason"] for row in deaths)
    for row in deaths:
        lost = f", {counted(rewind['lost_steps'], 'step')} to train again" if rewind["lost_steps"] else ""
        assert f"back to step {rewind['value']}{lost}; " in row["reason"]
        assert row["from_step"] == rewind["value"] and row["step"] == row["from_step"] + 1 and row["seconds"] > 0
        assert row["reason"].startswith(f"{row['who']} on {os.uname().nodename} (pid {row['pid']}) died at ")
        assert finished.out.splitlines().count(row["reason"]) == 1, finished.text
    assert "raylet" not in finished.text, "a paragraph of Ray's for each death"
    assert len(broken.events("attempt")) == 1, "Ray restarted nothing"
    weights, others = (load_file(run.path / "weights" / "model.safetensors") for run in (broken, unbroken))
    assert weights.keys() == others.keys()
    assert all(bool((weights[name] == others[name]).all()) for name in others)


@pytest.mark.timeout(500)
def test_nobody_comes_in_the_place_of_a_killed_host(
    fit: Callable[..., Any], guest_job: Job, place: Any, tiny_text: Path
) -> None:
    """The survivors keep their experts and take those of the dead one; without a survivor the run ends."""
    unbroken = fit(long_job(guest_job, tiny_text, "unbroken"))
    alone = {"kills": "KillsHost", "retry": {"host_wait_s": 0}}
    fewer = fit(long_job(guest_job, tiny_text, "fewer", hosts=3, **alone))
    assert (place.folder / "host killed").exists() and fewer.result["status"] == "done"
    (rewind,) = [row for row in fewer.events("decision") if row["what"] == "rewind"]
    assert "2 of 3 hosts hold all experts; results are equal within rounding only" in rewind["reason"]
    before, after = fewer.events("placement")
    (dead,) = [int(row["who"].rpartition(" ")[2]) for row in fewer.events("death")]
    survivors = [host for host in range(3) if host != dead]
    assert (before["num_hosts"], after["num_hosts"]) == (3, 2) and after["version"] == before["version"] + 1
    for old, new in zip(before["layers"], after["layers"], strict=True):
        homes = [(was[0], survivors[now[0]]) for was, now in zip(old["copies"], new["copies"], strict=True)]
        assert all(was == now for was, now in homes if was != dead) and any(was == dead for was, _ in homes)
        counts = [[now for _, now in homes].count(host) for host in survivors]
        assert max(counts) - min(counts) <= 1, "each orphan goes to the host with the fewest experts"
    assert rewind["seconds"] > 0 and rewind["value"] % 5 == 0
    for (step, loss), (other, expected) in zip(fewer.losses(), unbroken.losses(), strict=True):
        assert step == other and loss == pytest.approx(expected, rel=1e-5), step
    assert len(fewer.losses()) == 40
    (place.folder / "host killed").unlink()
    none_left = fit(long_job(guest_job, tiny_text, "none-left", hosts=1, **alone))
    assert none_left.result["status"] == "failed"
    assert "1 of 1 expert hosts are not ready" in none_left.result["reason"]
    assert "retry.host_wait_s" in none_left.result["reason"]
    assert len(none_left.events("attempt")) == 1, "it is final: nothing was tried again"
