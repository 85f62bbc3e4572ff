"""NVIDIA devices through NVML, as CUDA would show them to a process with the same environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Device:
    """One accelerator. `index` counts the visible ones of its machine, as torch does; bytes 0 = unknown."""

    kind: str  # "cuda", "rocm" or "cpu"
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    uuid: str | None
    index: int
    free_bytes: int | None = None


def visible_devices(environ: Mapping[str, str], *, nvml: Any = None) -> tuple[list[Device], list[str]]:
    """The devices CUDA would show, in its order, and notes on what is missing or hidden.

    Args:
        environ: `CUDA_VISIBLE_DEVICES` is read from it: indices, UUIDs or their beginnings; empty hides all.
        nvml: the pynvml module or a stand-in; imported where None.
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
    """(physical indices in visible order, what is wrong with `text` or "") by CUDA's own rules.

    CUDA ends the list at the first entry it does not know, and shows nothing if an entry stands twice.
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
            return [], f"device {token!r} stands twice; CUDA then shows none"
        chosen += matches
    return chosen, ""


def narrow_visible(environ: Mapping[str, str], indices: list[int]) -> str:
    """The CUDA_VISIBLE_DEVICES that shows only these of the devices that are visible now.

    Args:
        environ: the environment in which `indices` were counted.
        indices: as torch counts them there, in the order wanted.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    names = [] if text is None else [part.strip() for part in text.split(",")]
    return ",".join(str(index) if text is None else names[index] for index in indices)


def driver_version(*, nvml: Any = None) -> str | None:
    """The NVIDIA driver's version, None without one."""
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
        return [], ["no GPU can be seen: the package nvidia-ml-py is not installed"]
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return [], [f"no NVIDIA GPU: {error}"]
    try:
        return [_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())], []
    except nvml.NVMLError as error:
        return [], [f"NVML answers, but its devices cannot be read: {error}"]
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
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _import_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
