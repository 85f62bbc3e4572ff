"""Jobs and arms of bench `strategies`: the processes of each strategy train the same job, a block at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count, NonNegativeInt
from jobs.bench.harness.inputs import job_of
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import ArmProcesses, ArmServer
from raytrain.plan.rules.hosts import number_of_hosts
from raytrain.plan.strategies import Strategy

GPT, MIXTURE = "raytrain.models.gpt:gpt", "experts.models:moe_gpt"
JOBS: dict[str, dict[str, Any]] = {
    "small dense": {"builder": GPT, "layers": 2, "heads": 4, "width": 64, "context": 64},
    "experts": {"builder": MIXTURE, "layers": 2, "heads": 4, "width": 128, "context": 64},
    "wider dense": {"builder": GPT, "layers": 2, "heads": 4, "width": 384, "context": 64},
}
TINY = {"layers": 1, "heads": 2, "width": 16, "context": 16}
EXPERTS = {"num_experts": 4, "top_k": 2, "inflight": 1}


class StrategiesOptions(BenchOptions):
    """The strategies of three jobs, by prediction and by measurement."""

    MEASURES: ClassVar[str] = "predicted against measured step times of all strategies, and their order, for three jobs"
    QUICK: ClassVar[dict[str, Any]] = {
        "jobs": ["experts"], "only": ["1 process", "1 worker, 2 expert hosts"], "batch": 4, "blocks": 3,
        "block_steps": 2, "dropped": 1, "settle_s": 0,
    }  # fmt: skip

    jobs: list[str] = Field(default_factory=lambda: list(JOBS), description=f"of {', '.join(JOBS)}")
    only: list[str] = Field(default_factory=list, description="names of the strategies to measure; [] measures all")
    batch: Count = Field(16, description="rows of a step, over all workers")
    block_steps: Count = Field(10, description="steps of one block")
    dropped: Count = Field(2, description="warm-up blocks")
    settle_s: NonNegativeInt = Field(180, description="seconds to wait for an idle machine before rates are measured")


def strategy_job(
    options: StrategiesOptions, model: Mapping[str, Any], keys: Mapping[str, Any], *, text: Path, save_dir: Path
) -> dict[str, Any]:
    """The job with the keys of one strategy, in fp32."""
    scale = {key.partition(".")[2]: value for key, value in keys.items() if key.startswith("scale.")}
    hosts = {"hosts": keys["experts.hosts"]} if "experts.hosts" in keys else {}
    sections: dict[str, Any] = {"experts": {**EXPERTS, **hosts}} if model["builder"] == MIXTURE else {}
    return job_of(
        options, dict(model), text, name="strategies", precision={"dtype": "fp32"}, **sections,
        loop={"global_batch_size": options.batch, "log_every": options.block_steps},
        scale={"workers": 1, "threads": options.threads, "overlap": False, "shares": "equal", **scale},
        save={"dir": str(save_dir)},
    )  # fmt: skip


def start_arms(
    server: ArmServer, options: StrategiesOptions, model: Mapping[str, Any], strategies: Sequence[Strategy], *,
    text: Path, first: int,
) -> dict[str, ArmProcesses]:  # fmt: skip
    """The processes of each strategy, by its name, all of them about to take their first step.

    Args:
        first: number of the first arm; those of different jobs have different names.
    """
    arms: dict[str, ArmProcesses] = {}
    for number, one in enumerate(strategies, first):
        job = strategy_job(options, model, one.keys, text=text, save_dir=server.folder / f"runs{number}")
        settings = {
            "job": job, "arm": f"arm{number}", "threads": one.threads, "workers": one.workers,
            "hosts": number_of_hosts(one.hosts), "remote": one.hosts not in ("none", 0),
            "experts": [EXPERTS["num_experts"]] * model["layers"], "store": str(server.folder / f"store{number}"),
        }  # fmt: skip
        arms[one.name] = ArmProcesses(
            server, settings["arm"], "jobs.bench.search.strategies_member", settings, processes=one.processes,
            connecting=one.workers, environment={"OMP_NUM_THREADS": str(one.threads), "GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip
        arms[one.name].await_ready()
    return arms
