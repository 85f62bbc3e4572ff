"""GPUs as facts: NVIDIA's through NVML, AMD's from the kernel driver's files under /sys, neither through torch.

`cluster.devices.inventory` calls it once per machine; a process sees the devices that its environment variables show
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------- nvidia

MIG = "MIG-"
"""What the UUID of a MIG device begins with: a part of a GPU that CUDA shows as a device."""


@dataclass(frozen=True)
class Device:
    """One accelerator. `index` counts the visible devices of its machine, as torch does; 0 bytes = unknown. One that is
    `unified` has no memory of its own and uses the machine's (Jetson, GB10)."""

    kind: str  # "cuda", "rocm" or "cpu"
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    uuid: str | None
    index: int
    free_bytes: int | None = None
    unified: bool = False


@dataclass(frozen=True)
class FoundDevices:
    """The devices that a process can use, and what it should know of the others: `notes` about missing or hidden ones,
    and `unusable` GPUs, which exist and cannot be used although nothing asked for that, each with the reason."""

    devices: list[Device]
    notes: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Gpu:
    """A physical GPU: as a device, or its MIG devices where MIG is on (`partitions` is a list then)."""

    device: Device
    partitions: list[Device] | None = None


def visible_devices(environ: Mapping[str, str], *, nvml: Any = None) -> FoundDevices:
    """The devices that CUDA shows, in its order, by `CUDA_VISIBLE_DEVICES` of this environment (indices, UUIDs or UUID
    prefixes of GPUs and MIG devices; empty hides all).

    A GPU that cannot be read does not hide the others. Of GPUs that are divided by MIG, CUDA shows a process one MIG
    device, the first of those that are visible, and no other device.
    """
    gpus, found = _all_gpus(nvml)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    chosen: list[_Gpu | Device] = [gpu for gpu in gpus if gpu is not None]
    if wanted is not None and gpus:
        partitions = [one for gpu in gpus if gpu is not None for one in gpu.partitions or ()]
        names = ["" if gpu is None else gpu.device.uuid or "" for gpu in gpus]
        places, problem = select_visible(wanted, [*names, *(one.uuid or "" for one in partitions)], gpus=len(gpus))
        named = [(*gpus, *partitions)[place] for place in places]
        chosen = [one for one in named if one is not None]
        if problem:
            found.unusable.append(f"CUDA_VISIBLE_DEVICES={wanted!r}: {problem}")
            found.notes.append(found.unusable[-1])
        if len(named) < len(gpus):
            found.notes.append(f"CUDA_VISIBLE_DEVICES={wanted!r} shows {len(named)} of {len(gpus)} GPUs")
    # what CUDA makes of the visible GPUs and MIG devices
    whole, parts = list[Device](), list[Device]()
    for one in chosen:
        if isinstance(one, Device):
            parts.append(one)
        elif one.partitions is None:
            whole.append(one.device)
        elif one.partitions:
            parts += one.partitions
        else:
            found.unusable.append(f"{_title(one.device)}: MIG is on, and it has no MIG devices")
    hidden = [one.uuid or one.name for one in parts[1:]] + [_title(one) for one in whole]
    if parts and hidden:
        found.notes.append(
            f"CUDA shows a process one MIG device and no other GPU: {parts[0].name} ({parts[0].uuid}) is used, not"
            f" {', '.join(hidden)}; CUDA_VISIBLE_DEVICES=MIG-UUID picks another"
        )
    devices = parts[:1] or whole
    return replace(found, devices=[replace(device, index=place) for place, device in enumerate(devices)])


def _title(device: Device) -> str:
    return f"GPU {device.index} ({device.name})"


def select_visible(text: str, uuids: list[str], *, gpus: int | None = None) -> tuple[list[int], str]:
    """(indices into `uuids` in visible order, the problem with `text` or ""), following CUDA's rules.

    CUDA ends the list at the first unknown entry, and shows no device if an entry occurs twice.

    Args:
        gpus: how many of the first `uuids` are of GPUs, which numbers can name too; None: all.
    """
    numbered = len(uuids) if gpus is None else gpus
    chosen: list[int] = []
    for token in (part.strip() for part in text.split(",")):
        if token.lstrip("+").isdigit():
            matches = [int(token)] if int(token) < numbered else []
        else:
            matches = [place for place, uuid in enumerate(uuids) if token and uuid.startswith(token)]
        if len(matches) != 1:
            hides_all = token in ("", "-1", "NoDevFiles", "void")
            return chosen, "" if hides_all else f"there is no device {token!r}; CUDA ends the list there"
        if matches[0] in chosen:
            return [], f"device {token!r} is listed twice; CUDA then shows none"
        chosen += matches
    return chosen, ""


def narrow_visible(
    environ: Mapping[str, str], devices: Sequence[Device], *, variables: Sequence[str] = ("CUDA_VISIBLE_DEVICES",)
) -> str:
    """The value of these variables that leaves only these of the devices that were found in this environment, in this
    order. Of the variables the first that is set counts: on ROCm `VISIBLE`."""
    text = next((environ[name] for name in variables if name in environ), None)
    names = [] if text is None else [part.strip() for part in text.split(",")]

    def name(device: Device) -> str:
        if device.uuid is not None and device.uuid.startswith(MIG):
            return device.uuid
        return str(device.index) if text is None else names[device.index]

    return ",".join(map(name, devices))


@contextlib.contextmanager
def _asking(nvml: Any) -> Iterator[Any]:
    """Context manager with NVML, initialised; None without a driver. `nvml` is a substitute for the pynvml module."""
    nvml = import_nvml() if nvml is None else nvml
    if nvml is not None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            nvml = None
    try:
        yield nvml
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def driver_version(*, nvml: Any = None) -> str | None:
    """The version of the NVIDIA driver; None without a driver."""
    with _asking(nvml) as asked:
        return asked and _or_none(asked, lambda: _text(asked.nvmlSystemGetDriverVersion()))


def cuda_of_driver(*, nvml: Any = None) -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA that the driver supports; None without a driver."""
    with _asking(nvml) as asked:
        version = asked and _or_none(asked, lambda: int(asked.nvmlSystemGetCudaDriverVersion_v2()))
    return None if version is None else (version // 1000, version % 1000 // 10)


def _all_gpus(nvml: Any) -> tuple[list[_Gpu | None], FoundDevices]:
    """The GPUs by NVML's index, None for one that cannot be read, and remarks."""
    found = FoundDevices([])
    nvml = nvml or import_nvml()
    if nvml is None:
        found.notes.append("no GPU can be detected: the package nvidia-ml-py is not installed")
        return [], found
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        found.notes.append(f"no NVIDIA GPU: {error}")
        if not isinstance(error, _errors(nvml, "LibraryNotFound", "DriverNotLoaded")):
            found.unusable.append(f"NVML cannot be used, although it is installed: {error}")
        return [], found
    gpus = list[_Gpu | None]()
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_read(nvml, index))
            except nvml.NVMLError as error:
                gpus.append(None)
                found.unusable.append(f"GPU {index} cannot be read: {error}")
                found.notes.append(found.unusable[-1])
    except nvml.NVMLError as error:
        found.unusable.append(f"NVML is available, but its devices cannot be counted: {error}")
        found.notes.append(found.unusable[-1])
    finally:
        nvml.nvmlShutdown()
    return gpus, found


def _read(nvml: Any, index: int) -> _Gpu:
    """A GPU and its MIG devices. What NVML does not know of it is unknown, and hides nothing."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    capability = _or_none(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    shown = None if capability is None else (int(capability[0]), int(capability[1]))
    device = _device(nvml, handle, index, shown)
    mode = _or_none(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    if mode is None or not mode[0]:
        return _Gpu(device)
    partitions = list[Device]()
    for place in range(int(_or_none(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0)):
        part = _or_none(nvml, lambda at=place: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, at))
        if part is not None:  # there is a MIG device in this place
            partitions.append(_device(nvml, part, index, shown))
    return _Gpu(device, partitions)


def _device(nvml: Any, handle: Any, index: int, capability: tuple[int, int] | None) -> Device:
    unified, memory = False, None
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        unified = isinstance(error, _errors(nvml, "NotSupported"))  # a GPU without memory of its own, such as GB10
    name, uuid = (_or_none(nvml, lambda of=of: _text(getattr(nvml, of)(handle)))
                  for of in ("nvmlDeviceGetName", "nvmlDeviceGetUUID"))  # fmt: skip
    total, free = (0, None) if memory is None else (int(memory.total), int(memory.free))
    return Device("cuda", name or "NVIDIA GPU", total, capability, uuid, index, free_bytes=free, unified=unified)


def _or_none(nvml: Any, read: Callable[[], Any]) -> Any:
    """What NVML says; None where it does not know, or where these bindings lack the function."""
    try:
        return read()
    except (nvml.NVMLError, AttributeError):
        return None


def _errors(nvml: Any, *names: str) -> tuple[type[Exception], ...]:
    """NVML's exception types of these names, as far as the bindings have them."""
    found = (getattr(nvml, f"NVMLError_{name}", None) for name in names)
    return tuple(one for one in found if one is not None)


def _text(value: str | bytes) -> str:
    """A string from NVML; older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def import_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


# ---------------------------------------------------------------- amd

NODES = "sys/class/kfd/kfd/topology/nodes"
VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""HIP uses the first of these that is set, after `ROCR_VISIBLE_DEVICES` has been applied."""
VIDEO_MEMORY = (1, 2)
"""Heap types of device memory: visible to the host, and not visible to it."""


def amd_devices(environ: Mapping[str, str], *, root: Path) -> FoundDevices:
    """The devices that HIP shows to a process with this environment; none without the driver."""
    found: list[Device] = []
    for folder in sorted((root / NODES).glob("*"), key=lambda path: (len(path.name), path.name)):
        facts = _facts(folder / "properties")
        if not facts.get("simd_count"):  # a CPU
            continue
        target = facts.get("gfx_target_version", 0)
        name = f"AMD gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
        banks = [_facts(path) for path in sorted(folder.glob("mem_banks/*/properties"))]
        size = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in VIDEO_MEMORY)
        unique = facts.get("unique_id", 0)
        uuid = f"GPU-{unique:016x}" if unique else None
        found.append(Device("cuda", name, size, capability=None, uuid=uuid, index=len(found)))
    problems: list[str] = []
    for variable in ("ROCR_VISIBLE_DEVICES", next((name for name in VISIBLE if name in environ), "")):
        if variable in environ and found:
            chosen, problem = select_visible(environ[variable], [device.uuid or "" for device in found])
            problems += [f"{variable}={environ[variable]!r}: {problem}"] if problem else []
            found = [replace(found[index], index=place) for place, index in enumerate(chosen)]
    return FoundDevices(found, list(problems), problems)


def _facts(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    if not path.is_file():
        return {}
    pairs = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
