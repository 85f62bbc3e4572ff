"""What `infer` runs: a trained run, a JOB.yaml, a folder of transformers, or a builder, as an `InferenceModel`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.devices.inventory import BF16_CAPABILITY, Inventory
from jobs.driver.result import weights_step
from jobs.driver.runtime import cluster_address
from jobs.job.facts import formula_facts, resolve_model_paths, resolved, run_named
from jobs.job.spec import JobSpec, LoadedSpec, load_spec
from raytrain.config.sections import ModelConfig, ScaleConfig
from raytrain.config.user_code import make_importable
from raytrain.errors import InputError
from raytrain.execution.export import checkpoint_of
from raytrain.infer.model import InferenceModel
from raytrain.models.huggingface import CAUSAL_LM, CLASSIFIER, KEYS, has_tokenizer, read_config
from raytrain.models.weights.headers import find_weights
from raytrain.plan.machines import DevicePool, choose_devices, of_ray
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import Store, join, open_store, typed_path
from raytrain.train.job import source_facts

EXPECTED = "a run folder, a JOB.yaml, a folder of transformers, or module:function"
#: The source of a job that was made for a model alone: it is never opened.
NO_DATA = "raytrain.infer:none"
_BUILDER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Target:
    model: InferenceModel  # to load on each worker
    spec: JobSpec  # the job with the overrides
    name: str  # for messages and the output folder
    identity: dict[str, Any]  # what the model's answers depend on, for `OutputFolder.begin`
    machines: DevicePool  # the devices that may be used
    warnings: tuple[str, ...] = ()  # about devices that cannot be used although `scale` allows or names them
    run: RunFolder | None = None  # the trained run, None for another kind of target
    hosts_given: bool = False  # whether the command names `experts.hosts`; a job names it for its training

    @property
    def address(self) -> str:
        return cluster_address(self.spec.cluster.address)

    def on(self, inventory: Inventory) -> Target:
        """The same target on other machines, which may have other devices and formats."""
        machines, warnings = machines_of(self.spec, inventory)
        dtype, device = _precision(self.spec, machines)
        model = replace(self.model, dtype=dtype, device=device)
        return replace(self, model=model, machines=machines, warnings=tuple(warnings))


def open_target(given: str | None, overrides: Sequence[str], inventory: Inventory) -> Target:
    """Find the model that `infer` is to run. `given`: a run folder (`latest` or None: the newest run), a JOB.yaml, a
    folder that transformers wrote, or a builder as module:function. Raises InputError: it is none of these, or it
    has no weights."""
    make_importable(os.getcwd())
    given = given and typed_path(given, key="infer")
    if given is not None and _BUILDER.fullmatch(given) and not os.path.exists(given):
        found = _of_model({"builder": given}, given, overrides, inventory)
    elif given is not None and given.endswith((".yaml", ".yml")):
        found = target_of(load_spec(given, overrides), os.path.splitext(os.path.basename(given))[0], inventory)
    elif given is not None and os.path.isfile(os.path.join(given, "config.json")):
        config, path = read_config(given), os.path.abspath(given)
        keys: dict[str, Any] = {"builder": CAUSAL_LM, "path": path}
        if "Classification" in str((config.get("architectures") or [""])[0]):
            keys |= {"builder": CLASSIFIER, "num_labels": len(config.get("id2label") or {0: "0", 1: "1"})}
        found = _of_model(keys, os.path.basename(path), overrides, inventory)
    else:
        found = _of_run(given, overrides, inventory)
    return replace(found, hosts_given=any(one.partition("=")[0] == "experts.hosts" for one in overrides))


def _target(
    spec: JobSpec, model: ModelConfig, facts: Mapping[str, Any], reads: Mapping[str, Any], tokenizer: str | None,
    inventory: Inventory, *, name: str, identity: dict[str, Any], run: RunFolder | None = None,
) -> Target:  # fmt: skip
    formula_facts(spec, facts)  # checks the keys of a built-in model, which the plan reads before the builder does
    machines, warnings = machines_of(spec, inventory)
    length = spec.data.keys.get("max_length")
    found = InferenceModel(
        model, {"experts": spec.experts}, facts, reads, tokenizer, *_precision(spec, machines), seed=spec.seed,
        longest=length if isinstance(length, int) else None,
    )  # fmt: skip
    return Target(found, spec, name, {**identity, "builder": model.builder}, machines, tuple(warnings), run)


# ---------------------------------------------------------------- a run


def _of_run(given: str | None, overrides: Sequence[str], inventory: Inventory) -> Target:
    try:
        run = run_named(given or "latest")
    except InputError as error:
        raise InputError("infer", got=error.got, expected=EXPECTED) from error
    if not run.exists(run.job_mapping):
        raise InputError("infer", got=f"{run.path}, which is no run", expected=EXPECTED)
    trained = run.recorded_job()
    trained.pop("scale", None)  # how it was trained: the machines of this command may be others
    spec = resolved(load_spec(mapping=trained, overrides=overrides).spec)
    try:
        weights, step = weights_of(run, spec.infer.weights)
    except InputError as error:
        if given not in (None, "latest"):
            raise
        raise InputError(
            "infer", got=f"no RUN, and the newest run has no weights ({error.got})", expected=EXPECTED,
            remedy="name a run that has trained: raytrain infer RUN infer.input=FILE",
        ) from error  # fmt: skip
    saved, about = run.saved_steps(), dict[str, Any]()  # what the checkpoints say about the data, if one is left
    if saved:
        newest = step if step in saved else saved[-1]
        about = run.read_json(f"checkpoints/step_{newest:08d}/manifest.json").get("extra", {})
    facts, reads, tokenizer = (about.get(name) for name in ("source_facts", "reads", "tokenizer"))
    if facts is None or reads is None:  # a run of an earlier version: its data tells
        facts, reads = _of_source(spec)
    # the weights of the folder of transformers that it was trained from are not read
    changed = {"init_from": weights} | ({"init": "random"} if spec.model.builder in KEYS else {})
    model, identity = spec.model.model_copy(update=changed), {"model": _content_of(weights), "step": step}
    name = os.path.basename(run.path)
    return _target(spec, model, facts, reads, tokenizer, inventory, name=name, identity=identity, run=run)


def weights_of(run: RunFolder, wanted: str | int) -> tuple[str, int]:
    """Path and step of the weights of a run: those it exported, or a checkpoint's."""
    if wanted == "auto" and run.exists(run.weights):
        return os.path.dirname(run.weights), weights_step(run) or 0
    from jobs.export import export_weights_of, planned_step

    step = planned_step(run) if wanted == "auto" else wanted
    info = checkpoint_of(run, step)
    try:
        find_weights(info.path, key="infer.weights")
        return info.path, info.step
    except InputError:  # other processes hold a part of it in files of their own
        target = join(run.path, f"exports/step_{info.step:08d}")
        if not open_store(target).entries(""):
            export_weights_of(run, info.step, target)
        return target, info.step


def _of_source(spec: JobSpec) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    from jobs.driver.build import opened

    source = opened(spec)
    return source_facts(source), source.reads


# ---------------------------------------------------------------- other targets


def target_of(loaded: LoadedSpec, name: str, inventory: Inventory) -> Target:
    """The model of a job that has not been trained: with the weights of `model.init_from`, or of its folder."""
    spec = loaded.spec
    model = resolve_model_paths(spec.model)
    unopened = spec.data.source == NO_DATA or model.builder in KEYS
    facts, reads = ({}, {}) if unopened else _of_source(resolved(spec))
    path = model.keys.get("path")
    tokenizer = path if isinstance(path, str) and has_tokenizer(path) else None
    weights = model.init_from or path
    identity = {"model": _content_of(str(weights)) if weights else None}
    return _target(spec, model, facts, reads, tokenizer, inventory, name=name, identity=identity)


def _of_model(model: dict[str, Any], name: str, overrides: Sequence[str], inventory: Inventory) -> Target:
    """A model alone: no data is opened for it."""
    mapping = {"name": "infer", "model": model, "data": {"source": NO_DATA}}
    return target_of(load_spec(mapping=mapping, overrides=overrides), name, inventory)


def _content_of(path: str) -> str:
    """A hash of the files of some weights: of their names, sizes, and first and last bytes."""
    import hashlib

    found = find_weights(path, key="model.init_from")
    summed = hashlib.sha256()
    store: Store = found.store
    for name in sorted(found.files):
        folder, leaf = os.path.split(name)
        size = next(entry.size for entry in store.entries(folder) if entry.name == leaf)
        if store.is_local:
            with open(store.local_copy(name, ""), "rb") as file:
                edges = file.read(1 << 16)
                file.seek(max(0, size - (1 << 16)))
                edges += file.read()
        else:
            edges = store.read_head(name, 1 << 16)
        summed.update(name.encode() + b"%d " % size + edges)
    return summed.hexdigest()[:16]


def machines_of(spec: JobSpec, inventory: Inventory) -> tuple[DevicePool, list[str]]:
    """The devices that `scale` allows, and warnings about those that it names and that cannot be used. `inventory`:
    of the machines that compute. That of this machine says nothing about a cluster: no GPU then, until `Target.on`
    gets the cluster's."""
    warnings: list[str] = []
    if cluster_address(spec.cluster.address) != "local" and not of_ray(inventory):
        return choose_devices(ScaleConfig(mode="cpu"), inventory, warnings), warnings
    return choose_devices(spec.scale, inventory, warnings), warnings


def _precision(spec: JobSpec, machines: DevicePool) -> tuple[str, str]:
    """(format, device): half precision only if it is asked for, or on GPUs that have bf16."""
    gpus, wanted = machines.gpus, spec.precision.dtype
    has_bf16 = all(gpu.capability is None or gpu.capability >= BF16_CAPABILITY for gpu in gpus)
    half = "bf16" if gpus and has_bf16 and wanted == "auto" else "fp32"
    return wanted if wanted in ("bf16", "fp16") else half, f"cuda:{gpus[0].index}" if gpus else "cpu"
