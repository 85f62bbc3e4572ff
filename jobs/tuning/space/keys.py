"""`tune.space`: the keys of a job to search and their values. Pure, without torch and Ray.

A key takes a list (`[16, 32]`), or one of `loguniform(low, high)`, `uniform(low, high)`, `randint(low, high)` (both
ends included) and `choice(a, b, ...)`. If all keys have lists, the trials are the grid of all combinations; otherwise
each trial draws one value per key. A draw depends only on the job's seed and the trial's number, so that a resumed
search draws the same values again.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raytrain.config.messages import describe
from raytrain.config.yaml12 import plain_scalar
from raytrain.errors import InputError

DRAWS = 16
"""Default of `tune.max_trials` for a space that contains a distribution."""

GRAMMAR = "a list, or a string such as loguniform(1e-4, 1e-2), uniform(0, 1), randint(1, 8) or choice(a, b)"
_CALL = re.compile(r"(loguniform|uniform|randint|choice)\(([^()]*)\)\Z")
_KEPT = ("name", "seed", "save", "tune", "infer", "retry", "telemetry", "cluster")
"""Sections and keys that cannot differ between trials."""


@dataclass(frozen=True)
class Choices:
    """A list of values."""

    values: tuple[Any, ...]

    def draw(self, rng: random.Random) -> Any:
        return rng.choice(self.values)

    @property
    def examples(self) -> tuple[Any, ...]:
        """Values to validate against the job: all of them."""
        return self.values


@dataclass(frozen=True)
class Range:
    """A distribution between two numbers, both included: `loguniform`, `uniform` or `randint`."""

    kind: str
    low: float
    high: float

    def draw(self, rng: random.Random) -> Any:
        if self.kind == "randint":
            return rng.randint(int(self.low), int(self.high))
        if self.kind == "uniform":
            return rng.uniform(self.low, self.high)
        return min(self.high, max(self.low, math.exp(rng.uniform(math.log(self.low), math.log(self.high)))))

    @property
    def examples(self) -> tuple[Any, ...]:
        """Values to validate against the job: the two ends and, for real numbers, one in between."""
        if self.kind == "randint":
            return (int(self.low), int(self.high))
        return (self.low, self.high, 0.5 * (self.low + self.high) + 1e-9 * (self.high - self.low))


@dataclass(frozen=True)
class Space:
    """Dotted key -> the values to try, in the order of the file."""

    keys: Mapping[str, Choices | Range]

    @property
    def is_grid(self) -> bool:
        return all(isinstance(one, Choices) for one in self.keys.values())

    def points(self, *, seed: int, most: int | None) -> Iterator[dict[str, Any]]:
        """Key -> value of each trial: every combination of lists, else `most` (16) draws without repeats."""
        if self.is_grid:
            lists = [one.examples for one in self.keys.values()]
            for values in itertools.islice(itertools.product(*lists), most):
                yield dict(zip(self.keys, values, strict=True))
            return
        seen: list[dict[str, Any]] = []
        number, wanted = 0, most or DRAWS
        while len(seen) < wanted and number < 20 * wanted:
            rng = random.Random(
                f"{seed} {number}"
            )  # a string as seed: the same draws on every machine and Python version
            point = {key: one.draw(rng) for key, one in self.keys.items()}
            number += 1
            if point not in seen:
                seen.append(point)
                yield point


def parse_space(space: Mapping[str, Any]) -> Space:
    """Parse `tune.space`, whose keys may be dotted or nested.

    Raises:
        InputError: the space is empty, a key cannot differ between trials, or a value is no list and no distribution.
    """
    flat = dict(_flattened(space, ""))
    if not flat:
        raise InputError(
            "tune.space",
            got="an empty mapping",
            expected="keys with the values to try, such as {optim.lr: [1e-3, 1e-2]}",
            remedy="leave it out to search batch size and precision",
        )
    for key in flat:
        if key.split(".")[0] in _KEPT:
            raise InputError(
                f"tune.space.{key}",
                got="a key that cannot differ between trials",
                expected="a key that changes the training, such as optim.lr or loop.global_batch_size",
            )
    return Space({key: _parsed(key, value) for key, value in flat.items()})


def _flattened(space: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in space.items():
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from _flattened(value, dotted)
        else:
            yield dotted, value


def _parsed(key: str, value: Any) -> Choices | Range:
    name = f"tune.space.{key}"
    if isinstance(value, list | tuple):
        return _choices(name, list(value))
    found = _CALL.match(value.strip()) if isinstance(value, str) else None
    if found is None:
        broken = isinstance(value, str) and "(" in value and ")" not in value
        remedy = "put it in quotes: inside {...} a comma ends the value" if broken else ""
        raise InputError(name, got=describe(value), expected=GRAMMAR, remedy=remedy)
    kind, arguments = found[1], [plain_scalar(part.strip()) for part in found[2].split(",")]
    if kind == "choice":
        return _choices(name, arguments)
    return _range(name, kind, arguments, got=value)


def _choices(name: str, values: list[Any]) -> Choices:
    if not values or values == [None]:
        raise InputError(name, got="an empty list", expected=GRAMMAR)
    twice = [value for place, value in enumerate(values) if any(_same(value, other) for other in values[:place])]
    if twice:
        raise InputError(name, got=f"{describe(twice[0])} twice", expected="each value once")
    return Choices(tuple(values))


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and left == right


def _range(name: str, kind: str, arguments: list[Any], *, got: str) -> Range:
    numbers = [one for one in arguments if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(arguments) != 2 or len(numbers) != 2 or not all(math.isfinite(one) for one in numbers):
        raise InputError(name, got=got, expected=f"{kind}(low, high) with two numbers")
    low, high = numbers
    if kind == "randint" and not all(isinstance(one, int) for one in numbers):
        raise InputError(name, got=got, expected="randint(low, high) with two integers")
    if low >= high or (kind == "loguniform" and low <= 0):
        wanted = "0 < low < high" if kind == "loguniform" else "low < high"
        raise InputError(name, got=got, expected=f"{kind}(low, high) with {wanted}")
    return Range(kind, low, high)
