"""A user's module in training: put on its device and into training mode, what its passes may change, sent by pickle."""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

#: Dtypes whose tensors torch pickles but does not read again, as their storages have no type -> one of the same size.
_SENT_AS = {
    torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.int8, torch.float8_e5m2: torch.int8, torch.float8_e8m0fnu: torch.int8,
}  # fmt: skip
#: Bytes of an element of the formats in which weights are trained; narrower ones (float8) hold quantized values.
TRAINED_BYTES = (2, 4, 8)


def place(module: nn.Module, *, device: torch.device | None, master: torch.dtype) -> None:
    """Put a module on the device in the format of its master weights, in place, and in training mode.

    Parameters, frozen ones included, take the master format; complex ones its complex counterpart. A buffer of the
    format that parameters have follows them (the statistics of a batch norm); any other keeps its own, such as the
    complex table of a rotary embedding, seconds in float64 or quantized values. Strides stay as they are; a parameter
    with gaps in memory (a slice) is copied without them. `device`: None leaves it where it is.
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


def limited_weights(module: nn.Module) -> dict[nn.Parameter, list[nn.Embedding | nn.EmbeddingBag]]:
    """The weights of embeddings with `max_norm`, each with those that look up its rows."""
    found: dict[nn.Parameter, list[nn.Embedding | nn.EmbeddingBag]] = {}
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            weight = part._parameters.get("weight")
            if weight is not None:  # a parametrized weight is computed anew for each lookup
                found.setdefault(weight, []).append(part)
    return found


def may_change(module: nn.Module) -> list[nn.Parameter]:
    """What passes may change, as far as it is known before any: frozen parameters where they are no larger than the
    others (a teacher is as large as what it learns from, a frozen base is larger than its adapters), and embeddings
    with `max_norm`. Shards are never changed."""
    own = [one for one in module.parameters() if not is_sharded(one)]
    frozen, trained = (sum(one.nbytes for one in own if one.requires_grad is how) for how in (False, True))
    limited = limited_weights(module)
    return [one for one in own if one in limited or (not one.requires_grad and frozen <= trained)]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a shard of `fsdp`; without the import of torch's, which takes a second."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This worker's rows of a sharded tensor, sharing memory; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def make_sendable(module: nn.Module) -> None:
    """Let pickle send a module, also its parametrized parts (weight_norm, a user's own): torch gives each a class
    made at run time, whose instances refuse to be pickled."""
    for part in module.modules():
        if parametrize.is_parametrized(part) and "__getstate__" in vars(type(part)):
            copyreg.pickle(type(part), _reduced)  # pyright: ignore[reportArgumentType]  (of six values, as pickle takes)
    if any(tensor.dtype in _SENT_AS for tensor in (*module.parameters(), *module.buffers())):
        copyreg.pickle(Tensor, _reduced_tensor)  # pyright: ignore[reportArgumentType]


def _reduced(part: Any) -> tuple[Any, ...]:
    """Begins with a bare object of the original class: what refers back to it, such as a hook, finds it."""
    original: Any = type(part).__bases__[0]
    state = original.__getstate__(part), list(part.parametrizations)
    return object.__new__, (original,), state, None, None, _set


def _set(part: Any, state: tuple[Any, list[str]]) -> None:
    held, names = state
    part.__setstate__(held)
    parametrize._inject_new_class(part)
    for name in names:
        parametrize._inject_property(part, name)


def _reduced_tensor(tensor: Tensor) -> Any:
    sent_as = _SENT_AS.get(tensor.dtype)
    return tensor.__reduce_ex__(5) if sent_as is None else (Tensor.view, (tensor.view(sent_as), tensor.dtype))
