"""Experts on Ray actors, in a real run: trained as in one process; a host that is killed costs seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

Job = Callable[..., dict[str, Any]]


def moe_job(guest_job: Job, text: Path, **sections: Any) -> dict[str, Any]:
    """A small mixture-of-experts GPT on a text file, every step logged."""
    job = guest_job(**{"loop": {"max_steps": 12, "eval_every": 6, "global_batch_size": 8}, **sections})
    job["model"] = {"builder": "experts.models:moe_gpt", "layers": 2, "heads": 2, "width": 32, "context": 16}
    job["data"] = {"source": "text", "path": str(text)}
    return job


@pytest.mark.timeout(400)
def test_a_killed_host_is_replaced_and_the_series_is_that_of_an_unbroken_run(
    fit: Callable[..., Any], guest_job: Job, place: Any, tiny_text: Path
) -> None:
    def job(name: str, **sections: Any) -> dict[str, Any]:
        loop = {"max_steps": 60, "eval_every": 20, "global_batch_size": 8}
        job = moe_job(guest_job, tiny_text, loop=loop, **sections)
        return {**job, "name": name, "save": {"every": 5}, "telemetry": {"observers": ["guest_code:KillsHost"]}}

    unbroken = fit({**job("unbroken", experts={"hosts": 2}), "telemetry": {}})
    broken = fit(job("broken", experts={"hosts": 2}))
    assert (place.folder / "host killed").exists()
    assert broken.result["status"] == "done"
    assert broken.losses() == unbroken.losses() and len(broken.losses()) == 60
    assert broken.evals() == unbroken.evals()
    (rewind,) = [row for row in broken.events("decision") if row["what"] == "rewind"]
    assert "died" in rewind["reason"] and rewind["seconds"] > 0 and rewind["value"] % 5 == 0
    assert len(broken.events("attempt")) == 1, "Ray restarted nothing"
    weights, others = (load_file(run.path / "weights" / "model.safetensors") for run in (broken, unbroken))
    assert weights.keys() == others.keys()
    assert all(bool((weights[name] == others[name]).all()) for name in others)

