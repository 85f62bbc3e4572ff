"""The repeated blocks of a model: what is sharded, recomputed or compiled one by one.

A builder names them (`Trainable.blocks`); else they are the repeated module class that owns the most parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from raytrain.errors import InputError
from raytrain.trainable import Trainable

#: Names that a message lists.
NAMED_AT_MOST = 5

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Block = tuple[str, nn.Module]
"""(name in the module, the block)."""


def blocks_of(trainable: Trainable, *, key: str) -> list[Block]:
    """The blocks of a trainable's module, in the order of the model; never empty.

    Args:
        key: the YAML key that needs them, which an error names.

    Raises:
        InputError: the model neither names nor repeats anything, a name it does not have, blocks inside each other, or
            blocks that miss others of their kind.
    """
    module, given = trainable.module, trainable.blocks
    if given is None:
        found = repeated(module)
        if not found:
            raise InputError(
                key, seen=f"a {type(module).__name__} that repeats no module and names no blocks",
                expected="a builder that returns a Trainable with `blocks`, or a model with a list of equal modules",
            )  # fmt: skip
        return found
    names = [given] if isinstance(given, str) else list(given)
    found = [block for name in names for block in _named(module, name)]
    _check(module, found, said=", ".join(names))
    return found


def repeated(module: nn.Module) -> list[Block]:
    """The outermost modules, in lists (`ModuleList`, `ModuleDict`, `Sequential`), of the class that stands at least
    twice in one of them and owns the most parameters there; [] where nothing repeats."""
    listed = list(_in_lists(module))
    counts = Counter((id(owner), type(part)) for owner, _, part in listed)
    kinds = dict.fromkeys(kind for (_, kind), count in counts.items() if count > 1)  # in the order of the model
    candidates = [_outermost([(name, part) for _, name, part in listed if type(part) is kind]) for kind in kinds]
    # of classes that own the same parameters the one with fewer, larger modules: a block, not what it consists of
    return max(candidates, key=lambda blocks: (_parameters(blocks), -len(blocks)), default=[])


def outside(module: nn.Module, blocks: Iterable[Block]) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters of the module that no block owns, each once."""
    inside = {id(parameter) for _, block in blocks for parameter in block.parameters()}
    return [(name, parameter) for name, parameter in module.named_parameters() if id(parameter) not in inside]


def _named(module: nn.Module, name: str) -> list[Block]:
    """The module of this name; for a list of modules, which is never called itself, those in it."""
    try:
        part = module.get_submodule(name)
    except AttributeError as error:
        known = [known for known, inner in module.named_modules() if isinstance(inner, nn.ModuleList)]
        raise InputError(
            "model.builder", seen=f"a Trainable whose blocks are {name!r}",
            expected=f"names of modules of {type(module).__name__}",
            remedy=f"its lists of modules: {', '.join(known[:NAMED_AT_MOST]) or 'none'}",
        ) from error  # fmt: skip
    if isinstance(part, LISTS):
        return [(f"{name}.{leaf}", inner) for leaf, inner in part.named_children()]
    return [(name, part)]


def _check(module: nn.Module, blocks: Sequence[Block], *, said: str) -> None:
    """Blocks own parameters, none is inside another, and no other of their kind stands in a list (torch's own kinds
    aside, which may be anything)."""
    owned = {id(inner): name for name, block in blocks for inner in block.modules() if inner is not block}
    nested = [f"{name} in {owned[id(block)]}" for name, block in blocks if id(block) in owned]
    kinds = {type(block) for _, block in blocks if not type(block).__module__.startswith("torch.nn")}
    chosen = {id(inner) for _, block in blocks for inner in block.modules()}
    missed = [name for _, name, part in _in_lists(module) if type(part) in kinds and id(part) not in chosen]
    names = [f"{name}.{leaf}" for name in missed for leaf, _ in module.get_submodule(name).named_parameters()]
    problem = ""
    if not _parameters(blocks):
        problem = "own no parameter"
    elif nested:
        problem = f"stand inside each other: {', '.join(nested[:NAMED_AT_MOST])}"
    elif names:
        more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
        problem = f"miss parameters of {len(missed)} like them: {', '.join(names[:NAMED_AT_MOST])}{more}"
    if problem:
        raise InputError(
            "model.builder", seen=f"a Trainable whose blocks ({said}) {problem}",
            expected="blocks that are all of their kind, none inside another",
        )  # fmt: skip


def _in_lists(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(list, name, module) of everything with parameters that stands in a list, in the order of the model."""
    for path, part in module.named_modules():
        if isinstance(part, LISTS):
            for leaf, child in part.named_children():
                if not isinstance(child, (nn.ModuleList, nn.ModuleDict)) and next(child.parameters(), None) is not None:
                    yield part, f"{path}.{leaf}" if path else leaf, child


def _outermost(blocks: list[Block]) -> list[Block]:
    inner = {id(part) for _, block in blocks for part in block.modules() if part is not block}
    return [(name, block) for name, block in blocks if id(block) not in inner]


def _parameters(blocks: Iterable[Block]) -> int:
    owned = {id(parameter): parameter.numel() for _, block in blocks for parameter in block.parameters()}
    return sum(owned.values())
