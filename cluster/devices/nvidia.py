"""NVIDIA devices through NVML, as CUDA shows them to a process with the same environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Device:
    """One accelerator. `index` counts the visible devices of its machine, as torch does; 0 bytes = unknown."""

    kind: str  # "cuda", "rocm" or "cpu"
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    uuid: str | None
    index: int
    free_bytes: int | None = None


def visible_devices(environ: Mapping[str, str], *, nvml: Any = None) -> tuple[list[Device], list[str]]:
    """The devices that CUDA shows, in its order, and notes about missing or hidden devices.

    Args:
        environ: the environment with `CUDA_VISIBLE_DEVICES`: indices, UUIDs or UUID prefixes; empty hides all.
        nvml: the pynvml module or a substitute; imported if None.
    """
    devices, notes = _all_devices(nvml)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not devices:
        return devices, notes
    chosen, problem = select_visible(wanted, [device.uuid or "" for device in devices])
    if problem:
        notes.append(f"CUDA_VISIBLE_DEVICES={wanted!r}: {problem}")
    if len(chosen) < len(devices):
        notes.append(f"CUDA_VISIBLE_DEVICES={wanted!r} shows {len(chosen)} of {len(devices)} GPUs")
    return [replace(devices[index], index=place) for place, index in enumerate(chosen)], notes


def select_visible(text: str, uuids: list[str]) -> tuple[list[int], str]:
    """(physical indices in visible order, the problem with `text` or ""), following CUDA's rules.

    CUDA ends the list at the first unknown entry, and shows no device if an entry occurs twice.
    """
    chosen: list[int] = []
    for token in (part.strip() for part in text.split(",")):
        if token.lstrip("+").isdigit():
            matches = [int(token)] if int(token) < len(uuids) else []
        else:
            matches = [place for place, uuid in enumerate(uuids) if token and uuid.startswith(token)]
        if len(matches) != 1:
            hides_all = token in ("", "-1", "NoDevFiles", "void")
            return chosen, "" if hides_all else f"there is no device {token!r}; CUDA ends the list there"
        if matches[0] in chosen:
            return [], f"device {token!r} is listed twice; CUDA then shows none"
        chosen += matches
    return chosen, ""


def narrow_visible(environ: Mapping[str, str], indices: list[int]) -> str:
    """The value of CUDA_VISIBLE_DEVICES that leaves only these of the currently visible devices.

    Args:
        environ: the environment that `indices` refer to.
        indices: torch's device indices in that environment, in the wanted order.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    names = [] if text is None else [part.strip() for part in text.split(",")]
    return ",".join(str(index) if text is None else names[index] for index in indices)


def driver_version(*, nvml: Any = None) -> str | None:
    """The version of the NVIDIA driver; None without a driver."""
    nvml = nvml or _import_nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    finally:
        nvml.nvmlShutdown()


def _all_devices(nvml: Any) -> tuple[list[Device], list[str]]:
    nvml = nvml or _import_nvml()
    if nvml is None:
        return [], ["no GPU can be detected: the package nvidia-ml-py is not installed"]
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return [], [f"no NVIDIA GPU: {error}"]
    try:
        return [_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())], []
    except nvml.NVMLError as error:
        return [], [f"NVML is available, but its devices cannot be read: {error}"]
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        kind="cuda",
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        capability=(int(major), int(minor)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        index=index,
        free_bytes=int(memory.free),
    )


def _text(value: str | bytes) -> str:
    """A string from NVML; older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _import_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
