"""Decides whether the model of an inference job is divided over stages, and whether its experts are on hosts.

The plan shows both choices; the workers get them with their work.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cluster.wording import counted
from jobs.driver.build import check_joins
from jobs.inference.target import Target
from jobs.job.facts import has_experts, uses_hosts
from raytrain.errors import InputError
from raytrain.infer.model import InferenceModel
from raytrain.infer.quantize import KEY as QUANTIZE
from raytrain.infer.quantize import saved_bytes
from raytrain.infer.stages.partition import (
    KEY,
    MAP,
    POLICY,
    InferenceMemory,
    ModelPart,
    StagePlan,
    fewest_stages,
    inference_memory,
    mapped_stages,
    plan_stages,
    sizes_of_config,
    sizes_of_keys,
)
from raytrain.infer.stages.split import StageSplit, skeleton_of, stored_weights
from raytrain.infer.stages.stage import check_weights, parts_of
from raytrain.models.huggingface import read_config
from raytrain.plan.choice import size_text
from raytrain.plan.expert_hosts import number_of_hosts

if TYPE_CHECKING:
    from jobs.inference.plan import InferencePlan

# ---------------------------------------------------------------- stages


#: Tokens of a prompt that the estimate counts, where the model's context is not smaller.
PROMPT_TOKENS = 512
HALF = ("bf16", "fp16")


@dataclass(frozen=True)
class StageChoice:
    split: StageSplit | None  # None for a whole copy in each worker
    memory: InferenceMemory | None  # the estimate of a whole copy, None where the sizes are not known
    limit: int | None  # bytes that a device may use, None where unknown
    int8: int | None = None  # bytes of a whole copy with int8 weights, where the model was divided for want of memory

    @property
    def stages(self) -> int:
        """Devices that hold a replica of the model."""
        return 1 if self.split is None else self.split.plan.stages

    def lines(self) -> list[tuple[str, str]]:
        lines = []
        if self.memory is not None:
            fits = "" if self.limit is None else f" of {size_text(self.limit)} that a device may use"
            lines.append(("memory", f"about {size_text(self.memory.total)}{fits} ({self.memory})"))
        if self.split is not None:
            plan = self.split.plan
            lines += [(f"stage {stage}", plan.describe(stage)) for stage in range(plan.stages)]
            lines.append(("balance", self.split.balance))
            inflight = self.split.inflight  # a batch is in one stage at a time
            text = f"{counted(inflight, 'batch', 'batches')} at a time in each replica"
            if inflight < plan.stages:
                busy = f"at most {inflight} of {plan.stages} stages compute" if inflight > 1 else "one stage computes"
                text += f": {busy} while the others wait; infer.inflight auto keeps all of them busy"
            lines.append(("in flight", text))
        if self.int8 is not None and self.limit is not None:
            fits = "which fits one device" if self.int8 <= self.limit else "still more than a device may use"
            lines.append(("or", f"{QUANTIZE}=int8: about {size_text(self.int8)}, {fits}"))
        return lines


def choose_stages(target: Target, *, rows: int) -> StageChoice:
    """Divide the model as the keys say; with `infer.stages` auto only if a whole copy does not fit a device. `rows`:
    of a batch. Raises InputError: keys that contradict each other, a map that does not hold every part once and in
    order, a model that cannot be divided, or one that does not fit the devices."""
    infer, limit = target.spec.infer, device_limit(target)
    if infer.quantize is not None:  # stages have no int8 weights
        if infer.stage_map or infer.stages not in (1, "auto"):
            got = f"{infer.quantize} with {MAP if infer.stage_map else f'{KEY} {infer.stages}'}"
            raise InputError(QUANTIZE, got=got, expected="null, or one stage")
        return StageChoice(None, None, limit)
    memory, int8, balance = memory_of(target, rows=rows), None, "by bytes"
    if infer.stage_map:
        if infer.stages not in ("auto", len(infer.stage_map)):
            got = f"{infer.stages} with a map of {len(infer.stage_map)} stages"
            raise InputError(KEY, got=got, expected=f"auto or {len(infer.stage_map)}")
        if infer.stage_policy != "auto":
            raise InputError(POLICY, got=f"{infer.stage_policy} beside {MAP}", expected="auto, or no map")
        plan, balance = mapped_stages(_parts(target), infer.stage_map), f"as {MAP} says"
    elif infer.stage_policy == "sequential" and limit is None and infer.stages != 1:
        raise InputError(
            POLICY, got="sequential without a known memory of a device", expected="cluster.memory_limit, or balanced"
        )
    elif isinstance(infer.stages, int) and infer.stages > 1:
        plan = plan_stages(_parts(target), infer.stages, policy=infer.stage_policy, limit=limit)
    elif infer.stages == 1 or memory is None or limit is None or memory.total <= limit:
        return StageChoice(None, memory, limit)
    else:
        int8 = memory.total - saved_bytes(skeleton_of(target.model).module)
        plan = _fewest(target, memory, limit, int8)
    if infer.stage_policy == "sequential":
        balance = f"filled one after another ({POLICY})"
    split = None if plan.stages == 1 else StageSplit(plan, _inflight(target, plan.stages), balance=balance)
    return StageChoice(split, memory, limit, int8)


def _fewest(target: Target, memory: InferenceMemory, limit: int, int8: int) -> StagePlan:
    """The fewest stages of which each fits with its share of the caches."""
    parts, gpus = _parts(target), len(target.machines.gpus)

    def room(stages: int) -> int:
        caches = memory.cache * _inflight(target, stages) / stages
        return limit - math.ceil(memory.activations + caches)

    most = min(len(parts), gpus) if gpus else len(parts)
    try:
        return fewest_stages(parts, room, most=most, policy=target.spec.infer.stage_policy)
    except InputError as error:
        text = f"{QUANTIZE}=int8 needs about {size_text(int8)} on one device"
        raise InputError(
            error.key, got=error.got, expected=error.expected, remedy=f"{error.remedy}; {text} of {size_text(limit)}"
        ) from error


def device_limit(target: Target) -> int | None:
    """Bytes that the model may use on a device, None where unknown.

    On CPUs only `cluster.memory_limit` counts: stages on one machine would share its memory.
    """
    cluster = target.spec.cluster
    gpus = target.machines.gpus
    free = [gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in gpus]
    known = [int(cluster.memory_fraction * min(free))] if free else []
    known += [cluster.memory_limit] if cluster.memory_limit else []
    return min(known, default=None)


def memory_of(target: Target, *, rows: int) -> InferenceMemory | None:
    """The estimate of a whole copy, from the headers of its weights; None if it has none."""
    model = target.model
    path = model.model.keys.get("path")
    if model.model.init_from is None and not isinstance(path, str):
        return None
    weights = 4 * stored_weights(model).parameters
    if model.dtype in HALF:
        with contextlib.suppress(RuntimeError):  # of a builder that computes with its weights: the estimate stays high
            module = skeleton_of(model).module
            model.halve(module)
            weights = sum(parameter.nbytes for parameter in module.parameters())
    sizes = sizes_of_keys(model.model.keys, model.facts)
    if sizes is None and isinstance(path, str):
        sizes = sizes_of_config(read_config(path))
    tokens = PROMPT_TOKENS + target.spec.infer.max_new_tokens
    return inference_memory(weights, sizes, rows=rows, tokens=tokens, value_bytes=2 if model.dtype in HALF else 4)


def _parts(target: Target) -> list[ModelPart]:
    trainable = skeleton_of(target.model)
    check_weights(trainable.module, stored_weights(target.model))
    return parts_of(trainable)


def _inflight(target: Target, stages: int) -> int:
    """Batches in flight: two for each stage, so that one waits while another is computed."""
    wanted = target.spec.infer.inflight
    return wanted if isinstance(wanted, int) else 2 * stages


# ---------------------------------------------------------------- hosts


HOSTS_KEY = "experts.hosts"


@dataclass(frozen=True)
class HostChoice:
    hosts: int = 0  # of each worker; 0 keeps the experts in the worker
    reason: str = ""  # why; "" for a model without experts

    def lines(self) -> list[tuple[str, str]]:
        if not self.reason:
            return []
        where = f"on {self.hosts} hosts beside each worker" if self.hosts else "in each worker"
        return [("experts", f"{where} ({self.reason})")]


def choose_hosts(target: Target, *, rows: int) -> HostChoice:
    """Hosts if the command asks for them, or if the run was trained with hosts and a whole copy does not fit a device.

    A worker that holds all experts sends no rows, so it is faster wherever they fit. `rows`: of a batch. Raises
    InputError: hosts together with stages or int8 weights, or for a builder that keeps its experts."""
    spec, wanted = target.spec, target.spec.experts.hosts
    if not has_experts(spec):
        return HostChoice()
    if not target.hosts_given:
        hosts = number_of_hosts(wanted)
        if _divided(target):
            return HostChoice()
        if not hosts or target.spec.infer.quantize is not None:
            return HostChoice(0, "every worker holds a copy")
        memory, limit = memory_of(target, rows=rows), device_limit(target)
        if memory is None or limit is None or memory.total <= limit:
            return HostChoice(0, f"a copy fits, which is faster; {HOSTS_KEY}={hosts} uses hosts as in training")
        reason = f"as in training: a copy needs about {size_text(memory.total)} of {size_text(limit)}"
        return _checked(target, HostChoice(hosts, reason))
    if isinstance(wanted, dict) or wanted == "colocated":
        raise InputError(
            HOSTS_KEY, got=str(wanted), expected="the number of hosts of each worker, 0 or auto",
            remedy="scale.accelerator names the kind of device of workers and hosts",
        )  # fmt: skip
    if not isinstance(wanted, int) or wanted == 0:
        return HostChoice(0, HOSTS_KEY)
    return _checked(target, HostChoice(wanted, HOSTS_KEY))


def _divided(target: Target) -> bool:
    infer = target.spec.infer
    return bool(infer.stage_map) or infer.stages not in (1, "auto")


def _checked(target: Target, choice: HostChoice) -> HostChoice:
    infer, got = target.spec.infer, f"{choice.hosts} with"
    if _divided(target):
        named = MAP if infer.stage_map else f"{KEY} {infer.stages}"
        raise InputError(HOSTS_KEY, got=f"{got} {named}", expected="0 with stages, or one stage")
    if infer.quantize is not None:
        raise InputError(HOSTS_KEY, got=f"{got} infer.quantize {infer.quantize}", expected="0, or infer.quantize null")
    if uses_hosts(target.spec):
        check_joins(target.spec, target.model.facts)
    return choice


def with_hosts(model: InferenceModel, planned: InferencePlan, *, loopback: bool) -> InferenceModel:
    """The model with experts on hosts that its worker starts. `loopback`: the cluster is this machine alone."""
    from experts.hosts.host import ProcessLimits
    from experts.hosts.reserve import ReplicaConnection

    spec, on_gpu = planned.target.spec, planned.target.machines.on_gpu
    connection = ReplicaConnection(
        hosts=planned.hosts.hosts, threads=planned.threads, gpus=int(on_gpu), loopback=loopback,
        interface=spec.cluster.interface, dtype=model.dtype, retry=spec.retry, folder=planned.output.path,
        limits=ProcessLimits(spec.cluster.memory_fraction, spec.cluster.memory_limit),
    )  # fmt: skip
    return replace(model, sections={**model.sections, "experts": spec.experts.connected(connection)})
