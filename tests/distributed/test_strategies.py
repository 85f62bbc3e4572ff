"""One job with both strategies, which differ in one YAML key: data parallel, and experts on four Ray actors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Job = Callable[..., dict[str, Any]]


@pytest.mark.covers("EXP-02", "PAR-03", "VIS-04")
@pytest.mark.timeout(400)
def test_both_strategies_train_equally_and_the_report_shows_the_hosts_of_experts(
    fit: Callable[..., Any], run_cli: Callable[..., Any], guest_job: Job, place: Any, tiny_text: Path
) -> None:
    def job(name: str, **sections: Any) -> dict[str, Any]:
        loop = {"max_steps": 30, "eval_every": 15, "global_batch_size": 8, "log_every": 5}
        made = guest_job(**{"loop": loop, "telemetry": {}, "name": name, **sections})
        made["model"] = {"builder": "experts.models:moe_gpt", "layers": 2, "heads": 2, "width": 32, "context": 16}
        made["data"] = {"source": "text", "path": str(tiny_text)}
        made["precision"] = {"dtype": "fp32"}
        return made

    data = fit(job("data", scale={"workers": 1, "strategy": "data_parallel"}, experts={"num_experts": 6}))
    experts = {"num_experts": 6, "hosts": 4, "trace_every": 10}
    # a separate cluster with resources for each of its five processes
    path = place.write(job("expert", scale={"workers": 1, "strategy": "expert_parallel"}, experts=experts))
    done = run_cli("train", str(path), cwd=place.folder, env=place.env, timeout=200)
    assert done.code == 0, done.text
    expert = place.run
    assert [run.plan["strategy"]["value"] for run in (data, expert)] == ["data_parallel", "expert_parallel"]
    (steps, losses), (others, seen) = (zip(*run.losses(), strict=True) for run in (data, expert))
    assert steps == others and seen == pytest.approx(losses, rel=1e-5)
    assert expert.evals()[-1][1] == pytest.approx(data.evals()[-1][1], rel=1e-5) and losses[-1] < losses[0]
    norms, theirs = ([row["grad_norm"] for row in run.rows("train")] for run in (expert, data))
    assert norms == pytest.approx(theirs, rel=1e-5)
    (hosts,) = expert.events("expert_hosts")
    assert len({host["pid"] for host in hosts["hosts"]}) == 4, "as many actors as experts.hosts"

    (placement,) = expert.events("placement")
    shown = json.loads((expert.path / "report" / "expert_device_distribution.json").read_text())
    homes = [copies[0] for layer in placement["layers"] for copies in layer["copies"]]
    assert shown["homes"] == [homes.count(host) for host in range(4)] == [3, 3, 3, 3]
    assert shown["bytes"] == placement["bytes"] and (expert.path / "report/expert_device_distribution.png").exists()
    assert not (data.path / "report" / "expert_device_distribution.png").exists()
    for run in (data, expert):
        rows = [json.loads(line) for line in (run.path / "experts.jsonl").read_text().splitlines()]
        drawn = json.loads((run.path / "report" / "expert_activations.json").read_text())
        totals = [[sum(row["layers"][layer][e] for row in rows) for e in range(6)] for layer in range(2)]
        assert [panel["totals"] for panel in drawn["panels"]] == totals
        assert sum(map(sum, totals)) == 30 * 8 * 16 * 2 * 2, "steps x rows x tokens x top-k x layers"
    assert sorted(path.name for path in (expert.path / "routing").iterdir()) == [
        f"step_{step:08d}.npz" for step in (10, 20, 30)
    ]
