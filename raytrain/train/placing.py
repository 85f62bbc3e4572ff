"""Puts a module on its device for training: which of its tensors change their dtype, and which parts their mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Bytes of an element of the formats in which weights are trained; narrower ones (float8) hold quantized values.
TRAINED_BYTES = (2, 4, 8)


def place(module: nn.Module, *, device: torch.device | None, master: torch.dtype) -> None:
    """Put a module on the device in the format of its master weights, in place, and in training mode.

    Parameters, frozen ones included, take the master format; complex ones its complex counterpart. A buffer of the
    format that parameters have follows them (the statistics of a batch norm); any other keeps its own, such as the
    complex table of a rotary embedding, seconds in float64 or quantized values. Strides stay as they are; a parameter
    with gaps in memory (a slice) is copied without them.

    Args:
        device: None leaves it where it is.
    """
    formats = {one.dtype.to_real() for one in module.parameters() if is_trained(one)}
    targets = {id(one): _like(one, master) for one in module.parameters() if is_trained(one)}
    targets |= {id(one): _like(one, master) for one in module.buffers() if one.dtype.to_real() in formats}
    parameters = {id(one) for one in module.parameters()}

    def moved(tensor: Tensor) -> Tensor:
        found = tensor.to(device=device, dtype=targets.get(id(tensor), tensor.dtype))
        return found.clone() if id(tensor) in parameters and not fills_memory(found) else found

    module._apply(moved)
    set_training_mode(module)


def set_training_mode(module: nn.Module) -> None:
    """Put a module into training mode as its author means it.

    A module that arrives in eval mode as a whole is trained as a whole. Otherwise a part that is in eval mode stays in
    it, also where `module.train()` would change that; a `train` of the module's own decides as in any training loop.
    The exception is a model of transformers with a trainable parameter: `from_pretrained` returns it in eval mode.
    """
    kept = [part for part in module.modules() if not part.training] if module.training else []
    arrived = {id(inner) for part in kept if _is_pretrained(part) for inner in part.modules()}
    module.train()
    for part in kept:
        if id(part) not in arrived:
            part.training = False


def kept_in_eval(module: nn.Module) -> list[str]:
    """Names of the outermost parts that are in eval mode, of a module in training mode."""
    found: list[str] = []
    for name, part in module.named_modules():
        if not part.training and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def is_trained(parameter: Tensor) -> bool:
    """Whether it has a format in which weights can be trained."""
    real = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
    return real.is_floating_point and real.itemsize in TRAINED_BYTES


def _like(tensor: Tensor, master: torch.dtype) -> torch.dtype:
    return master.to_complex() if tensor.is_complex() else master


def _is_pretrained(part: nn.Module) -> bool:
    """Whether it is a model of transformers with a trainable parameter."""
    named = any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.partition(".")[0] == "transformers"
        for kind in type(part).__mro__
    )
    return named and any(parameter.requires_grad for parameter in part.parameters())


def fills_memory(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in memory, without gaps or overlaps, in some order of the dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda one: (one[1], one[0])):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True
