"""Find the repeated blocks of a model, the units of sharding, activation recomputation and compilation.

A builder names them (`Trainable.blocks`); otherwise they are the repeated module class with the most parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from raytrain.config.messages import abbreviated
from raytrain.errors import InputError
from raytrain.trainable import Trainable

#: Maximum number of names listed in a message.
NAMED_AT_MOST = 5

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Block = tuple[str, nn.Module]
"""(name in the module, the block)."""


def blocks_of(trainable: Trainable, *, key: str) -> list[Block]:
    """Return the blocks of a trainable's module in model order; never empty. `key`: the config key that needs them,
    named in errors. Raises InputError: there are no named or repeated blocks, a name does not exist, blocks are
    nested, or blocks of the same class are missing."""
    module, given = trainable.module, trainable.blocks
    if given is None:
        found = repeated(module)
        if not found:
            raise InputError(
                key, got=f"a {type(module).__name__} that repeats no module and does not name blocks",
                expected="a builder that returns a Trainable with `blocks`, or a model with a list of equal modules",
            )  # fmt: skip
        return found
    names = [given] if isinstance(given, str) else list(given)
    found = []
    for name in names:
        try:
            part = module.get_submodule(name)
        except AttributeError as error:
            known = [known for known, inner in module.named_modules() if isinstance(inner, nn.ModuleList)]
            raise InputError(
                "model.builder", got=f"a Trainable whose blocks are {name!r}",
                expected=f"names of modules of {type(module).__name__}",
                remedy=f"its lists of modules: {', '.join(known[:NAMED_AT_MOST]) or 'none'}",
            ) from error  # fmt: skip
        members = [(f"{name}.{leaf}", inner) for leaf, inner in part.named_children()]
        found += members if isinstance(part, LISTS) else [(name, part)]  # a list is never called itself
    _check(module, found, names_given=", ".join(names))
    return found


def repeated(module: nn.Module) -> list[Block]:
    """Return the outermost modules of the class that appears at least twice in a list (`ModuleList`, `ModuleDict`,
    `Sequential`) and owns the most parameters; [] if no class repeats."""
    listed = list(_in_lists(module))
    counts = Counter((id(owner), _class_of(part)) for owner, _, part in listed)
    kinds = dict.fromkeys(kind for (_, kind), count in counts.items() if count > 1)  # in the order of the model
    candidates: list[list[Block]] = []
    for kind in kinds:
        blocks = [(name, part) for _, name, part in listed if _class_of(part) is kind]
        inner = {id(part) for _, block in blocks for part in block.modules() if part is not block}
        candidates.append([(name, block) for name, block in blocks if id(block) not in inner])
    # among classes with equally many parameters prefer fewer, larger modules: a block, not its parts
    return max(candidates, key=lambda blocks: (_parameters(blocks), -len(blocks)), default=[])


def _class_of(part: nn.Module) -> type[nn.Module]:
    """The class that its author wrote: `torch.nn.utils.parametrize` makes another one for each module."""
    kind = type(part)
    return kind.__bases__[0] if "parametrizations" in part._modules else kind


def outside(module: nn.Module, blocks: Iterable[Block]) -> list[tuple[str, nn.Parameter]]:
    """Return the names and parameters that no block owns, each once."""
    inside = {id(parameter) for _, block in blocks for parameter in block.parameters()}
    return [(name, parameter) for name, parameter in module.named_parameters() if id(parameter) not in inside]


def called_modules(name: str, part: nn.Module) -> list[Block]:
    """The modules that are called for `part`: itself, or the elements of a list, which is never called itself."""
    if type(part).forward is not nn.Module.forward:
        return [(name, part)]
    return [block for leaf, inner in part.named_children() for block in called_modules(f"{name}.{leaf}", inner)]


def _check(module: nn.Module, blocks: Sequence[Block], *, names_given: str) -> None:
    """Check that blocks own parameters, are not nested, and include all listed modules of their class.

    Classes of torch.nn may serve other purposes and need not be complete.
    """
    owned = {id(inner): name for name, block in blocks for inner in block.modules() if inner is not block}
    nested = [f"{name} in {owned[id(block)]}" for name, block in blocks if id(block) in owned]
    kinds = {type(block) for _, block in blocks if not type(block).__module__.startswith("torch.nn")}
    chosen = {id(inner) for _, block in blocks for inner in block.modules()}
    missed = [name for _, name, part in _in_lists(module) if type(part) in kinds and id(part) not in chosen]
    names = [f"{name}.{leaf}" for name in missed for leaf, _ in module.get_submodule(name).named_parameters()]
    problem = ""
    if not _parameters(blocks):
        problem = "own no parameters"
    elif nested:
        problem = f"are nested in each other: {', '.join(nested[:NAMED_AT_MOST])}"
    elif names:
        problem = f"miss parameters of {len(missed)} like them: {abbreviated(names, NAMED_AT_MOST)}"
    if problem:
        raise InputError(
            "model.builder", got=f"a Trainable whose blocks ({names_given}) {problem}",
            expected="all modules of their class, none inside another",
        )  # fmt: skip


def _in_lists(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield (list, name, module) of every listed module with parameters, in model order."""
    for path, part in module.named_modules():
        if isinstance(part, LISTS):
            for leaf, child in part.named_children():
                if not isinstance(child, (nn.ModuleList, nn.ModuleDict)) and next(child.parameters(), None) is not None:
                    yield part, f"{path}.{leaf}" if path else leaf, child


def _parameters(blocks: Iterable[Block]) -> int:
    owned = {id(parameter): parameter.numel() for _, block in blocks for parameter in block.parameters()}
    return sum(owned.values())
