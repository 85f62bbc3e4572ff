"""Decides whether the experts of an inference job are on hosts, and how its workers reach them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jobs.driver.build import check_joins
from jobs.inference.stages import device_limit, memory_of
from jobs.inference.target import Target
from jobs.job.facts import has_experts, uses_hosts
from raytrain.errors import InputError
from raytrain.infer.model import InferenceModel
from raytrain.infer.stages.plan import KEY as STAGES
from raytrain.infer.stages.plan import MAP
from raytrain.plan.rules.hosts import number_of_hosts
from raytrain.plan.text import size_text

KEY = "experts.hosts"


@dataclass(frozen=True)
class HostChoice:
    """Where the experts are.

    Attributes:
        hosts: of each worker; 0 keeps the experts in the worker.
        reason: why; "" for a model without experts.
    """

    hosts: int = 0
    reason: str = ""

    def lines(self) -> list[tuple[str, str]]:
        """What the plan says about it."""
        if not self.reason:
            return []
        where = f"on {self.hosts} hosts beside each worker" if self.hosts else "in each worker"
        return [("experts", f"{where} ({self.reason})")]


def choose_hosts(target: Target, *, rows: int) -> HostChoice:
    """Hosts if the command asks for them, or if the run was trained with hosts and a whole copy does not fit a device.

    A worker that holds all experts sends no rows, so it is faster wherever they fit.

    Args:
        rows: of a batch.
    Raises:
        InputError: hosts together with stages or int8 weights, or for a builder that keeps its experts.
    """
    spec, wanted = target.spec, target.spec.experts.hosts
    if not has_experts(spec):
        return HostChoice()
    if not target.hosts_given:
        return _of_training(target, number_of_hosts(wanted), rows=rows)
    if isinstance(wanted, dict) or wanted == "colocated":
        raise InputError(
            KEY, got=str(wanted), expected="the number of hosts of each worker, 0 or auto",
            remedy="scale.accelerator names the kind of device of workers and hosts",
        )  # fmt: skip
    if not isinstance(wanted, int) or wanted == 0:
        return HostChoice(0, KEY)
    return _checked(target, HostChoice(wanted, KEY))


def _of_training(target: Target, hosts: int, *, rows: int) -> HostChoice:
    """The choice of a command that does not name the key."""
    if not hosts or _divided(target) or target.spec.infer.quantize is not None:
        return HostChoice(0, "every worker holds a copy") if not _divided(target) else HostChoice()
    memory, limit = memory_of(target, rows=rows), device_limit(target)
    if memory is None or limit is None or memory.total <= limit:
        return HostChoice(0, f"a copy fits, which is faster; {KEY}={hosts} uses hosts as in training")
    reason = f"as in training: a copy needs about {size_text(memory.total)} of {size_text(limit)}"
    return _checked(target, HostChoice(hosts, reason))


def _divided(target: Target) -> bool:
    infer = target.spec.infer
    return bool(infer.stage_map) or infer.stages not in (1, "auto")


def _checked(target: Target, choice: HostChoice) -> HostChoice:
    infer, got = target.spec.infer, f"{choice.hosts} with"
    if _divided(target):
        named = MAP if infer.stage_map else f"{STAGES} {infer.stages}"
        raise InputError(KEY, got=f"{got} {named}", expected="0 with stages, or one stage")
    if infer.quantize is not None:
        raise InputError(KEY, got=f"{got} infer.quantize {infer.quantize}", expected="0, or infer.quantize null")
    if uses_hosts(target.spec):
        check_joins(target.spec, target.model.facts)
    return choice


def with_hosts(model: InferenceModel, target: Target, choice: HostChoice, *, threads: int, loopback: bool,
               folder: str) -> InferenceModel:  # fmt: skip
    """The model with experts on hosts that its worker starts.

    Args:
        threads: of each host.
        loopback: the cluster is this machine alone.
        folder: of the job.
    """
    from experts.hosts.host import ProcessLimits
    from experts.hosts.replica import HostsOfReplica, ReplicaConnection

    spec = target.spec
    about = HostsOfReplica(
        hosts=choice.hosts, threads=threads, gpus=int(target.machines.on_gpu), loopback=loopback,
        interface=spec.cluster.interface, dtype=model.dtype, retry=spec.retry, folder=folder,
        limits=ProcessLimits(spec.cluster.memory_fraction, spec.cluster.memory_limit),
    )  # fmt: skip
    return replace(model, sections={**model.sections, "experts": spec.experts.connected(ReplicaConnection(about))})
