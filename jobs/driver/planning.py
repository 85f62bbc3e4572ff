"""The plan of a job: job -> machines -> facts -> Plan, and its table. Neither Ray nor torch is imported."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from cluster.devices.gpus import MIG, VISIBLE, narrow_visible
from cluster.devices.inventory import Inventory, installed_torch, local_inventory
from experts.sizes import check_room, idle_keys, shared_out
from jobs.job.facts import configured_hosts, formula_facts, resolved, shapes_of_data, uses_hosts, warn_of_named_devices
from jobs.job.spec import JobSpec, LoadedSpec
from raytrain.config.decode import encode
from raytrain.models.huggingface import folder_facts
from raytrain.plan.choice import Resolved
from raytrain.plan.expert_hosts import separate_hosts
from raytrain.plan.facts import DataFacts, ModelFacts
from raytrain.plan.machines import divided, pick_devices
from raytrain.plan.plan import Plan, PlanInputs, make_plan


def plan_job(
    loaded: LoadedSpec,
    *,
    inventory: Inventory | None = None,
    build: bool = False,
    model_facts: ModelFacts | None = None,
    data_facts: DataFacts | None = None,
    hosts_of_run: Any = None,
    workers: Resolved | None = None,
    split: str | None = None,
) -> Plan:
    """The plan of a job, with its full configuration and the source of each value.

    Args:
        inventory: the machines; by default this machine, with the devices that this process may use.
        build: check the job as `train` does, which opens the data and builds the model. Without it, choices that need
            the exact sizes are deferred to the start of the run.
        model_facts, data_facts: the sizes, if `check_on_driver` has determined them.
        hosts_of_run: of a resumed run, what `experts.hosts: auto` chose at its start: its checkpoints hold the experts
            so, and threads follow from it.
        workers: of an elastic run that continues with another number of workers, that number and why.
        split: how splitting a global batch changes what is trained, a warning where the plan does it.
    """
    spec = resolved(loaded.spec)
    unchecked: list[str] = []
    if build:
        from jobs.driver.check_job import check_on_driver  # imports torch

        checked = check_on_driver(spec)
        model_facts, data_facts = checked.model_facts, checked.data_facts
        unchecked, split = [checked.note] if checked.note is not None else [], checked.first.split
    if data_facts is None:  # without reading all of it; None if it must be opened to know them
        from raytrain.data.sources.open import check_label, describe_source

        check_label(spec.data, builder=spec.model.builder)
        data_facts = describe_source(spec.data, context=spec.model.keys.get("context"))
    machines = inventory or local_inventory()
    sized = model_facts or formula_facts(spec, shapes_of_data(spec, data_facts))
    sized = sized or folder_facts(spec.model.builder, spec.model.keys)
    asked = configured_hosts(spec)
    keeps = hosts_of_run not in (None, "none") and asked == "auto"
    scale = spec.scale if workers is None else spec.scale.model_copy(update={"workers": workers.value})
    compile_missing = share_out = None
    if spec.loop.compile != "off" and inventory is None:
        from cluster.devices.inventory import missing_for_compile

        compile_missing = missing_for_compile("cuda" if machines.devices() else "cpu")
    if sized is not None and sized.experts is not None:
        half = spec.precision.dtype in ("auto", "bf16", "fp16")
        devices = list(machines.devices())
        share_out = shared_out(sized.experts, spec.experts, devices, dtype="bf16" if half else "fp32")
    plan = make_plan(PlanInputs(
        data=spec.data, optim=spec.optim, precision=spec.precision, loop=spec.loop, save=spec.save, scale=scale,
        cluster=spec.cluster, experts_hosts=hosts_of_run if keeps else asked, experts_inflight=spec.experts.inflight,
        name=spec.name, seed=spec.seed, inventory=machines, model_facts=sized, data_facts=data_facts,
        compile_missing=compile_missing, share_out=share_out,
    ))  # fmt: skip
    on_gpu = plan.device.value_or(None) == "cuda"
    if on_gpu and separate_hosts(plan.hosts) and sized is not None and sized.experts is not None:
        gpus = divided(machines.devices(), plan.per_gpu)
        check_room(sized.experts, spec.experts, gpus, hosts=separate_hosts(plan.hosts))
    assert isinstance(plan.hosts, Resolved) and isinstance(plan.workers, Resolved)  # never deferred
    facts = None if sized is None else sized.experts
    warnings = [*plan.warnings, *unchecked, *warn_of_named_devices(spec)]
    passes = plan.accumulation.value_or(2) * (workers or plan.workers).value
    if split is not None and spec.loop.micro_batch_size != "whole":  # an out-of-memory may split one pass
        warnings.append(split if passes > 1 else f"{split}; one pass takes the global batch unless memory runs out")
    warnings += idle_keys(spec.experts, facts, place=plan.hosts.value, workers=plan.workers.value)
    hosts = _explained_for_own_builder(plan.hosts, spec, seen=model_facts is not None)
    hosts = replace(hosts, reason="auto chose this for the run that is resumed") if keeps else hosts
    return replace(
        plan, hosts=hosts, workers=workers or plan.workers, warnings=warnings, config=encode(spec),
        sources=dict(loaded.sources),
    )  # fmt: skip


def _explained_for_own_builder(hosts: Resolved, spec: JobSpec, *, seen: bool) -> Resolved:
    """The choice of hosts, with a reason for what is unknown about a user's own builder; `seen` if it was built."""
    builder = spec.model.builder or "your module"
    if builder.startswith(("experts.", "raytrain.")):
        return hosts
    if hosts.value == "none":
        return replace(hosts, reason=f"experts.num_experts is null, so {builder} is treated as a model without experts")
    if spec.experts.hosts == "auto":
        why = f"every worker holds the experts of {builder}; experts.hosts N or colocated distributes them"
        return replace(hosts, reason=why)
    if uses_hosts(spec) and not seen:
        later = f"whether {builder} supports remote experts is checked at the start (or with plan --build)"
        return replace(hosts, reason=f"{hosts.reason}; {later}")
    return hosts


def show_only_picked(accelerator: str, inventory: Inventory) -> None:
    """Restrict Ray and torch to the GPUs that the resolved `scale.accelerator` selects; call before a local cluster
    starts. Of GPUs that MIG divides, Ray and its workers get the MIG device that this process sees.

    On ROCm, HIP and Ray read HIP_VISIBLE_DEVICES before CUDA_VISIBLE_DEVICES, and Ray refuses two that differ: both are
    set.
    """
    divided = any((device.uuid or "").startswith(MIG) for device in inventory.devices())
    if accelerator not in ("cpu", "cuda") or (accelerator == "cuda" and divided):
        picked = pick_devices(accelerator, inventory)
        variables = VISIBLE if installed_torch().hip else ("CUDA_VISIBLE_DEVICES",)
        os.environ.update(dict.fromkeys(variables, narrow_visible(os.environ, picked, variables=variables)))
