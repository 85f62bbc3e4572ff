"""Checks before a run: storage, disk space, memory, device variables, the devices that a job wants, kernel caches.

`Check` is one line of the result. The driver runs `preflight` before each run and `raytrain check` on every node. What
a command that runs as a submitted Ray job may not do is checked here too.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from cluster.config import ClusterConfig
from cluster.devices.gpus import amd_devices, select_visible, visible_devices
from cluster.devices.inventory import Inventory
from cluster.devices.limits import ROOT
from cluster.ray_runtime import on_node
from cluster.wording import counted, size

# ---------------------------------------------------------------- preflight

DISK_SLACK = 64 << 20
"""Disk space for metrics, logs and the report, in addition to the checkpoints."""

PROCESS_BYTES = 600 << 20
"""Host memory of a worker that has imported torch and Ray, without tensors. Used if there is no estimate of host
memory."""

SHARED_MEMORY = 256 << 20
"""With less shared memory, Ray keeps its object store on disk."""


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check. `status` is ok, warn, fail or na; `key` names the key to change."""

    name: str
    status: str
    seen: str
    expected: str
    remedy: str = ""
    key: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def text(self) -> str:
        """One sentence: what was found, what was expected, what to do."""
        return f"{self.name}: {self.seen}, expected {self.expected}" + (f"; {self.remedy}" if self.remedy else "")


def judged(
    name: str, seen: str, expected: str, remedy: str = "", *, status: Literal["fail", "warn"] = "fail", key: str = ""
) -> CheckResult:
    """The result of a check: ok, unless there is something to remedy."""
    return CheckResult(name, status if remedy else "ok", seen, expected, remedy, key if remedy else "")


def check_storage(save_dir: str) -> CheckResult:
    """Creates the folder (a path or a URI that pyarrow supports), then writes, reads back and deletes a token in it."""
    token = secrets.token_hex(16)
    name = f".raytrain-{token}"
    try:
        round_trip = _remote_round_trip if "://" in save_dir else _round_trip
        seen = round_trip(save_dir, name, token)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        local = local_folder(save_dir) is not None
        return CheckResult(
            "storage", "fail", f"{save_dir}: {reason}",
            "a folder that can be written to" if local else "storage that can be written to",
            "set save.dir to a folder with free space that this user may write to" if local
            else "see the address in save.dir, the network and the credentials of this machine", "save.dir",
        )  # fmt: skip
    found, remedy = "written, read back and deleted", ""
    if seen != token:
        found, remedy = f"returned {seen!r} for {token!r}", "set save.dir to another folder"
    return judged("storage", f"{save_dir}: {found}", "a writable folder", remedy, key="save.dir")


def local_folder(save_dir: str) -> Path | None:
    """The folder of a path or of a ``file://`` URI; None for other storage."""
    uri = urlsplit(save_dir) if "://" in save_dir else None
    if uri is None:
        return Path(save_dir).expanduser().absolute()
    return Path(unquote(uri.path)) if uri.scheme == "file" else None


def _round_trip(folder: str, name: str, token: str) -> str:
    path = Path(folder).expanduser() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "x", encoding="ascii") as stream:
            stream.write(token)
            stream.flush()
            os.fsync(stream.fileno())  # a full disk or quota may only raise here
        return path.read_text(encoding="ascii")
    finally:
        path.unlink(missing_ok=True)


def _remote_round_trip(uri: str, name: str, token: str) -> str:
    from pyarrow import fs

    filesystem, inner = fs.FileSystem.from_uri(uri)
    path = f"{inner.rstrip('/')}/{name}"
    filesystem.create_dir(inner, recursive=True)
    try:
        with filesystem.open_output_stream(path) as stream:
            stream.write(token.encode())
        with filesystem.open_input_stream(path) as stream:
            return stream.read().decode()
    finally:
        if filesystem.get_file_info(path).type != fs.FileType.NotFound:
            filesystem.delete_file(path)


def check_place(save_dir: str, need_bytes: int | None, *, saved: int = 0) -> list[CheckResult]:
    """`check_storage` and `check_disk`; the space of a place that cannot be written does not matter."""
    storage = check_storage(save_dir)
    if storage.status == "fail":
        return [storage, CheckResult("disk", "na", f"{save_dir} cannot be written", "a place that can")]
    return [storage, check_disk(save_dir, need_bytes, saved=saved)]


def check_disk(save_dir: str, need_bytes: int | None, *, saved: int = 0) -> CheckResult:
    """Checks disk space for three checkpoints and the other files of a run.

    Args:
        need_bytes: bytes of one checkpoint; None if unknown before the start, and then only the slack is checked.
        saved: checkpoints that the run has there already.
    """
    folder = local_folder(save_dir)
    if folder is None:
        return CheckResult("disk", "na", f"{save_dir} is not a local disk", "a local disk")
    while not folder.exists():
        folder = folder.parent
    copies = max(1, 3 - saved)
    wanted = copies * (need_bytes or 0) + DISK_SLACK
    free = shutil.disk_usage(folder).free
    number = {1: "one checkpoint", 2: "two checkpoints", 3: "three checkpoints"}[copies] + (" more" if saved else "")
    expected = f"{size(wanted)} free: {number} and {size(DISK_SLACK)}"
    seen, remedy = f"{size(free)} free in {folder}", ""
    if free < wanted:
        remedy = "set save.dir to a disk with more free space, or free some"
        seen += f" ({size(max(wanted - free, 2**20))} too little)" if size(free) == size(wanted) else ""
    return judged("disk", seen, expected, remedy, key="save.dir")


def check_memory(need_bytes: int | None, *, inventory: Inventory, local_workers: int, on_gpu: bool) -> CheckResult:
    """Checks host memory for the `local_workers` of one node, on the node with the least of it.

    Args:
        need_bytes: estimated bytes of one worker, including the process itself; None if unknown. On a GPU these are
            bytes of device memory.
    """
    each = PROCESS_BYTES if on_gpu or need_bytes is None else need_bytes
    free = min(node.memory_bytes if node.free_bytes is None else node.free_bytes for node in inventory.nodes)
    expected = f"{size(each * local_workers)} for {counted(local_workers, 'worker')} of {size(each)}"
    if not free:
        return CheckResult("memory", "na", "the free memory is not known", expected)
    remedy = "lower scale.workers or loop.micro_batch_size" if free < each * local_workers else ""
    return judged("memory", f"{size(free)} free", expected, remedy, status="warn", key="loop.micro_batch_size")


def check_shared_memory(*, root: Path = ROOT) -> CheckResult:
    """Checks /dev/shm, where Ray keeps its objects; if it is too small, Ray keeps them on disk."""
    folder = root / "dev/shm"
    if not folder.is_dir():
        return CheckResult("shared_memory", "na", "there is no /dev/shm", "Linux")
    free = shutil.disk_usage(folder).free
    remedy = "give the container more (docker run --shm-size=1g)" if free < SHARED_MEMORY else ""
    return judged(
        "shared_memory", f"{size(free)} free in /dev/shm", f"{size(SHARED_MEMORY)} free", remedy, status="warn"
    )


def check_visible_devices(
    *, environ: Mapping[str, str] | None = None, nvml: Any = None, root: Path = ROOT
) -> CheckResult:
    """Checks that the variables that hide devices agree with each other and with the existing devices."""
    environ = os.environ if environ is None else environ
    text = environ.get("CUDA_VISIBLE_DEVICES")
    hip = [name for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if name in environ]
    named = [name for name in ("CUDA_VISIBLE_DEVICES", *hip) if name in environ]
    seen = ", ".join(f"{name}={environ[name]!r}" for name in named)
    expected = "one variable that names devices which exist, or none"
    problems = []
    if text is not None and any(environ[name] != text for name in hip):
        problems.append(f"CUDA_VISIBLE_DEVICES differs from {' and '.join(hip)}")
    if text is not None:
        about = f"CUDA_VISIBLE_DEVICES={text!r}: "
        found = visible_devices(environ, nvml=nvml)
        problems += [line.removeprefix(about) for line in found.unusable if line.startswith(about)]
        every = (visible_devices({}, nvml=nvml), amd_devices({}, root=root))
        if not any(one.devices or one.unusable for one in every) and select_visible(text, [])[1]:
            problems.append("this machine has no GPU")
    seen = f"{seen}: {'; '.join(problems)}" if problems else seen or "no variable hides a device"
    remedy = "unset all but one, and set that one to devices that exist" if problems else ""
    return judged("visible_devices", seen, expected, remedy, status="warn", key="CUDA_VISIBLE_DEVICES")


def run_preflight(
    *, save_dir: str, inventory: Inventory, checkpoint_bytes: int | None, worker_bytes: int | None, local_workers: int,
    on_gpu: bool, saved: int = 0,
) -> list[CheckResult]:  # fmt: skip
    """Runs all checks, in the order in which they are shown; `to_json` of each goes into preflight.json."""
    return [
        *check_place(save_dir, checkpoint_bytes, saved=saved),
        check_memory(worker_bytes, inventory=inventory, local_workers=local_workers, on_gpu=on_gpu),
        check_shared_memory(),
        check_visible_devices(),
    ]


@dataclass(frozen=True)
class DeviceSize:
    """What `check_wanted` compares of a GPU or of a node's CPU: `capability` is None where there is none."""

    name: str
    is_gpu: bool
    memory_bytes: int | None
    capability: tuple[int, int] | None


def check_wanted(config: ClusterConfig, devices: Iterable[DeviceSize]) -> CheckResult:
    """A warning if a device has less than the job is meant for (`cluster.wanted_memory`, `cluster.wanted_capability`);
    the job can still train there. What is not known of a device counts as enough."""
    memory, capability = config.wanted_memory, config.wanted_capability
    wanted = [f"{size(memory)} of memory"] if memory else []
    wanted += [f"compute capability {capability}"] if capability else []
    least = divmod(round(10 * (capability or 0)), 10)  # 8.6 is (8, 6)
    lesser = []
    for one in devices:
        less = [size(one.memory_bytes)] if memory and one.memory_bytes and one.memory_bytes < memory else []
        if capability and not one.is_gpu:
            less.append("no compute capability")
        elif capability and one.capability is not None and one.capability < least:
            less.append(f"compute capability {'.'.join(map(str, one.capability))}")
        lesser += [f"{one.name} has {' and '.join(less)}"] if less else []
    expected = " and ".join(wanted) or "any device"
    if not lesser:
        return CheckResult("wanted_devices", "ok" if wanted else "na", "no device has less", expected)
    key = "cluster.wanted_memory" if memory else "cluster.wanted_capability"
    remedy = f"scale.accelerator and cluster.address choose other devices; {key} says what the job is meant for"
    return CheckResult("wanted_devices", "warn", "; ".join(lesser), expected, remedy, key)


def check_caches(runtime: str | None, *, environ: Mapping[str, str] | None = None) -> CheckResult:
    """The versions that kernels are compiled for, and what compilers keep of earlier compilations.

    Args:
        runtime: of the devices, such as "CUDA 12.8".
    """
    environ = os.environ if environ is None else environ
    home = Path(environ.get("HOME") or tempfile.gettempdir())
    folders = {
        "torch.compile": environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{home.name}",
        "Triton": environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache",
        "CUDA": environ.get("CUDA_CACHE_PATH") or home / ".nv" / "ComputeCache",
    }
    kept = []
    for name, folder in folders.items():
        with contextlib.suppress(OSError):  # another process cleans up, or the folder is not ours
            sizes = [path.lstat().st_size for path in Path(folder).rglob("*")]
            kept += [f"{name} {size(sum(sizes))} in {folder}"] if sizes else []
    seen = f"{runtime or 'no CUDA'}; kept: {', '.join(kept) or 'nothing'}"
    return CheckResult("kernel_caches", "ok", seen, "any; a folder may be deleted, and kernels are compiled again")


def check_seen_by_all(paths: Mapping[str, str]) -> list[CheckResult]:
    """Checks by a task on every live node that it can access the local paths that its workers will open.

    Args:
        paths: key of the job -> path (URIs are not checked: they are the same on all nodes).
    """
    local = {key: path for key, path in paths.items() if "://" not in path}
    missing = _ask_nodes(list(local.values())) if local else {}
    results = []
    for key, path in local.items():
        blind = [node for node, unseen in missing.items() if path in unseen]
        seen = f"{path}, which does not exist on {', '.join(blind)}" if blind else path
        remedy = "use shared storage or a URI (s3://, gs://, hdfs://)" if blind else ""
        status = "fail" if blind else "ok"
        results.append(CheckResult("seen_by_all", status, seen, "a path that exists on every node", remedy, key))
    return results


def _ask_nodes(paths: list[str]) -> dict[str, list[str]]:
    """{node: the paths that it cannot access}."""
    import ray

    tasks = on_each_node(lambda: [path for path in paths if not os.path.exists(path)])
    return dict(zip(tasks, ray.get(list(tasks.values()), timeout=60), strict=True))


def on_each_node(
    function: Callable[..., Any], *args: Any, gpus: bool = False, only: Collection[str] | None = None
) -> dict[str, Any]:  # fmt: skip
    """Starts a task on each live node of the connected cluster: address -> reference to the result.

    Args:
        gpus: each task takes all GPUs of its node; else it takes nothing.
        only: the nodes, as an earlier call named them; None for all.
    """
    import ray

    remote, found, names = ray.remote(function), dict[str, Any](), set[str]()
    for node in sorted(ray.nodes(), key=lambda one: (one["NodeManagerAddress"], one["NodeID"])):  # Ray's is any order
        if not node["Alive"]:
            continue
        slots = node["Resources"].get("GPU", 0) if gpus else 0
        name = node["NodeManagerAddress"]
        name = name if name not in names else f"{name} ({node['NodeID'][:8]})"
        names.add(name)
        if only is not None and name not in only:
            continue
        found[name] = remote.options(num_cpus=0, num_gpus=slots, scheduling_strategy=on_node(node["NodeID"])).remote(
            *args
        )
    return found


# ---------------------------------------------------------------- ray job

JOB_ENVIRONMENT = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this variable in the driver of a submitted job."""

PACKAGE_CACHE = "runtime_resources"
"""Directory of a Ray session that holds the working directories of jobs; Ray deletes them."""


def is_submitted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is the driver of a submitted job."""
    return bool((os.environ if environ is None else environ).get(JOB_ENVIRONMENT))


def submission_id(environ: Mapping[str, str] | None = None) -> str | None:
    """The ID of the job that this process is the driver of; None outside a submitted job."""
    text = (os.environ if environ is None else environ).get(JOB_ENVIRONMENT)
    return json.loads(text).get("metadata", {}).get("job_submission_id") if text else None


def check_ray_job(save_dir: str, *, environ: Mapping[str, str] | None = None) -> list[CheckResult]:
    """Check that the results of a submitted job outlive it; nothing for a command that is no submitted job."""
    if not is_submitted(environ):
        return []
    expected = "a folder that outlives the job, on storage that every node can access"
    folder = save_dir if "://" in save_dir else str(Path(save_dir).expanduser().resolve())
    seen, remedy = folder, ""
    if PACKAGE_CACHE in Path(folder).parts and "://" not in save_dir:
        seen = f"{folder}, which is in Ray's copy of the working directory of this job"
        remedy = "Ray deletes that copy: set save.dir to an absolute path or a URI (s3://, gs://, hdfs://)"
    return [judged("save_folder", seen, expected, remedy, key="save.dir")]
