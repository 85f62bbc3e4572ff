"""What is known of a job before torch is loaded: absolute paths, sizes, devices in user code, `--inventory`.

`jobs.driver.planning` gives it to the plan.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from cluster.config import Count, Positive, Section, Text
from cluster.devices.inventory import Device, Inventory, Node
from cluster.devices.limits import BF16_FLAGS
from cluster.preflight import is_submitted
from jobs.job.spec import JobSpec
from raytrain.config.decode import decode, load_value
from raytrain.config.messages import abbreviated, describe
from raytrain.config.sections import DataConfig, ModelConfig
from raytrain.data.sources.sections import is_path_key
from raytrain.data.sources.tokenised import resolve_text_keys
from raytrain.errors import InputError
from raytrain.models.huggingface import KEYS
from raytrain.plan.facts import DataFacts, ModelFacts
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import typed_path

# ---------------------------------------------------------------- facts
# What is known about a job's model and data without torch: sizes by formula and from headers, use of experts.


def shapes_of_data(spec: JobSpec, data_facts: DataFacts | None) -> dict[str, Any]:
    """The facts of the data that a builder may take (vocab_size, ...), as far as known without opening the data."""
    from raytrain.data.sources.open import describe_shapes

    shapes = describe_shapes(spec.data)
    if data_facts is not None and data_facts.vocab_size is not None:
        shapes["vocab_size"] = data_facts.vocab_size
    return shapes


def formula_facts(spec: JobSpec, shapes: Mapping[str, Any]) -> ModelFacts | None:
    """Sizes of a built-in model by formula; None for other models, or if `shapes` lacks a needed value."""
    from experts.sizes import expert_facts
    from raytrain.models.sizes import model_facts

    builder, keys = spec.model.builder, spec.model.keys
    if builder is None:
        return None
    return model_facts(builder, keys, shapes) or expert_facts(builder, keys, shapes, spec.experts)


def configured_hosts(spec: JobSpec) -> Any:
    """`experts.hosts`; None for a dense model. `auto` is 0 for a user's own builder, which may not use hosts."""
    if not has_experts(spec):
        return None
    ours = (spec.model.builder or "").startswith("experts.")
    return spec.experts.hosts if ours or spec.experts.hosts != "auto" else 0


def uses_hosts(spec: JobSpec) -> bool:
    """Whether a user's own builder must move its experts to hosts; built-in expert models always do."""
    ours = (spec.model.builder or "").startswith("experts.")
    return not ours and configured_hosts(spec) not in (None, 0)


def has_experts(spec: JobSpec) -> bool:
    """Whether the model is a built-in one with experts, or a user's whose job sets their number or hosts."""
    builder, asked = spec.model.builder or "", spec.experts
    configured = asked.num_experts is not None or asked.hosts not in ("auto", 0)
    return builder.startswith("experts.") or (configured and not builder.startswith("raytrain."))


# ---------------------------------------------------------------- paths
# Makes relative paths absolute and fills in what the data takes from its model, once on the driver; torch-free.


def resolved(spec: JobSpec) -> JobSpec:
    """The job with absolute paths, and with the data keys that are derived from its model."""
    model = resolve_model_paths(spec.model)
    return spec.model_copy(update={"model": model, "data": resolve_paths(resolve_text_keys(spec.data, model))})


def resolve_model_paths(model: ModelConfig) -> ModelConfig:
    """Make `init_from` absolute on the driver and, for builders that read a folder, `path` too."""
    changed = {} if model.init_from is None else {"init_from": _absolute(model.init_from, must_exist=False)}
    if model.builder in KEYS and "path" in model.keys:
        changed["path"] = _absolute(model.keys["path"], must_exist=False)
    return model.model_copy(update=changed) if changed else model


def local_paths(spec: JobSpec, *, missing: bool = False) -> dict[str, str]:
    """Every local path that workers read, by key, or with `missing` those where nothing exists; the entries of a list
    are numbered (`key[0]`)."""
    given = {f"data.{key}": value for key, value in spec.data.keys.items()}
    given |= {"model.init_from": spec.model.init_from, "model.path": spec.model.keys.get("path")}
    found = {}
    for key, value in given.items():
        values = value if isinstance(value, list | tuple) else [value]
        for number, path in enumerate(values):
            local = isinstance(path, str) and os.path.isabs(path)
            if local and (os.path.exists(path) or bool(glob(path))) is not missing:
                found[key if len(values) == 1 else f"{key}[{number}]"] = path
    return found


def resolve_paths(data: DataConfig) -> DataConfig:
    """The section with relative paths made absolute on the driver; URIs are unchanged.

    A built-in source declares which of its keys are paths. In a user's own source, a string is a path if its key ends
    like one (`path`, `..._path`, `_file`, `_dir`) and the path exists.
    """
    own = ":" in (data.source or "")
    changed = {
        key: _absolute(value, must_exist=own) for key, value in data.keys.items() if is_path_key(data.source, key)
    }
    return data.model_copy(update=changed) if changed else data


def absolute_path(path: str) -> str:
    """A local path made absolute on this machine; a URI is unchanged."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def run_named(name: str) -> RunFolder:
    """The run folder that a user names; `latest`: the newest one in `runs`."""
    return RunFolder.open("runs/latest" if name == "latest" else name)


def path_from_here(path: str) -> str:
    """A path as a user types it: relative where it is below the current folder, otherwise as it is. A submitted job
    runs in a folder of the cluster, where nobody types anything."""
    if "://" in path or not os.path.isabs(path) or is_submitted():
        return path
    try:
        relative = os.path.relpath(path)
    except OSError:  # the current folder was deleted
        return path
    if relative.partition(os.sep)[0] == os.pardir:
        return path
    return f"./{relative}" if relative[0] in "-~$" or "=" in relative else relative  # no option, variable or key


def text_from_here(text: str, path: str) -> str:
    """A text with this path as in `path_from_here`, also where it begins another path."""
    return re.sub(rf"{re.escape(path)}(?![\w-])", lambda _: path_from_here(path), text)


def _absolute(value: Any, *, must_exist: bool) -> Any:
    if isinstance(value, list | tuple):
        return [_absolute(item, must_exist=must_exist) for item in value]
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "://" in text:
        return value
    path = absolute_path(text)
    return path if not must_exist or os.path.exists(path) else value


# ---------------------------------------------------------------- named devices
# Finds devices named in the user's code, for warnings in the plan.


#: torch's names of accelerators. "cpu" is correct in a dataset, whose rows are moved later.
ACCELERATORS = ("cuda", "hip", "xpu", "mps")
#: The warning lists at most this many places of a file.
LISTED_PLACES = 3


def warn_of_named_devices(spec: JobSpec) -> list[str]:
    """A warning for each file of `model.builder` and `data.source` that names an accelerator.

    raytrain chooses one device for each process and moves the model and each batch to it.
    """
    found = []
    files = []
    for module, _, function in ((given or "").partition(":") for given in (spec.model.builder, spec.data.source)):
        if function and module.split(".")[0] not in ("raytrain", "experts", "jobs", "cluster"):
            below = module.replace(".", os.sep)
            ends = (f"{below}.py", os.path.join(below, "__init__.py"))
            places = (Path(folder, end) for folder in (os.getcwd(), *sys.path) for end in ends)
            files += [path for path in places if path.is_file()][:1]
    for path in dict.fromkeys(files):
        places = list(named_devices(path.read_text(encoding="utf-8", errors="replace")))
        if places:
            named = abbreviated([f"{path.name}:{line} {what}" for line, what in places], LISTED_PLACES)
            found.append(
                f"{named}: raytrain moves the model and each batch to the worker's own device; remove it,"
                " or use the device of an existing tensor (x.device)"
            )
    return found


def named_devices(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each call in Python source that names an accelerator; none if it cannot be parsed, which
    importing it reports better."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        called = call.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        values = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "device")]
        given = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        named = [text for text in given if text.split(":")[0] in ACCELERATORS]
        by_keyword = any(keyword.arg == "device" for keyword in call.keywords)
        for_cuda = name == "cuda" or (name == "set_device" and ast.unparse(called).endswith("cuda.set_device"))
        if isinstance(called, ast.Attribute) and for_cuda:
            yield call.lineno, f".{name}()"
        elif named and (name in ("to", "device", "set_default_device") or by_keyword):
            yield call.lineno, f'{name}("{named[0]}")'


# ---------------------------------------------------------------- nodes file
# `--inventory nodes.yaml`: a hand-written list of machines to plan for.


GIB = 1 << 30


class GpuEntry(Section):
    name: Text = Field(description="such as A100 or NVIDIA H100 80GB HBM3")
    memory_gib: Positive = Field(description="memory of one GPU")
    capability: Annotated[float, Field(ge=1, lt=100)] | None = Field(
        None, description="CUDA compute capability, such as 8.0; null: unknown"
    )
    count: Count = Field(1, description="number of such GPUs")


class NodeEntry(Section):
    host: Text = Field(description="name of the machine, unique in the file")
    cpus: Count = Field(description="usable CPU cores")
    memory_gib: Positive = Field(description="main memory")
    gpus: list[Any] = Field([], description="a list of {name, memory_gib, capability, count}")


def inventory_from_file(path: str | Path) -> Inventory:
    origin = str(path)
    try:
        text = Path(typed_path(origin, key="--inventory")).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "which does not exist" if isinstance(error, FileNotFoundError) else str(error)
        raise InputError("--inventory", got=f"{origin}, {why}", expected="a YAML list of machines") from error
    rows = load_value(text, origin=origin)
    if not isinstance(rows, list) or not rows:
        expected = "a list of machines such as `- {host: a, cpus: 8, memory_gib: 32}`"
        raise InputError(origin, got=describe(rows), expected=expected)
    entries = [decode(NodeEntry, row, prefix=f"nodes[{place}]") for place, row in enumerate(rows)]
    nodes = tuple(_node(entry, place=place) for place, entry in enumerate(entries))
    hosts = [node.host for node in nodes]
    for place, host in enumerate(hosts):
        if host in hosts[:place]:
            raise InputError(f"nodes[{place}].host", got=f"{host} twice", expected="a different name for each machine")
    return Inventory(
        nodes=nodes,
        source=f"the file {origin}",
        cpu_model=f"the CPU of {origin}",
        cpu_flags=dict.fromkeys(BF16_FLAGS, False),
    )


def _node(entry: NodeEntry, *, place: int) -> Node:
    devices: list[Device] = []
    for number, row in enumerate(entry.gpus):
        gpu = decode(GpuEntry, row, prefix=f"nodes[{place}].gpus[{number}]")
        capability = None if gpu.capability is None else divmod(round(10 * gpu.capability), 10)  # 8.6 is (8, 6)
        first, memory = len(devices), int(gpu.memory_gib * GIB)
        devices += [Device("cuda", gpu.name, memory, capability, None, first + one) for one in range(gpu.count)]
    return Node(entry.host, entry.cpus, int(entry.memory_gib * GIB), tuple(devices))
