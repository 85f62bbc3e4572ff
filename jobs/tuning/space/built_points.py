"""Whether the models of `tune.space` can be built, found on the driver before a trial is spent on one that cannot."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from jobs.driver.build import build, opened
from jobs.job.spec import JobSpec
from raytrain.config.decode import encode
from raytrain.config.user_code import resolve
from raytrain.errors import InputError
from raytrain.models.registry import takes
from raytrain.train.build import source_facts

MOST_S = 60.0
"""So long models are built; what is not checked by then fails in its own trial, if it does."""


class Builds:
    """Builds each distinct model of a space once, on the meta device where it can be.

    Args:
        base: the job without the space's values.
        shapes: what its data tells a builder (`raytrain.train.build.source_facts`); None: opened when first asked.
    """

    def __init__(self, base: JobSpec, shapes: Mapping[str, Any] | None = None) -> None:
        self._ends = time.monotonic() + MOST_S
        self._shapes: dict[str, Mapping[str, Any]] = {} if shapes is None else {_data_key(base): shapes}
        self._found: dict[str, InputError | None] = {}

    def check(self, spec: JobSpec) -> None:
        """Build the model of this job, unless the time for it is over.

        Raises:
            InputError: it cannot be built, or its data cannot be opened.
        """
        key = _model_key(spec)
        if key not in self._found and time.monotonic() < self._ends:
            try:
                build(spec, self._shapes_of(spec))
            except InputError as error:
                self._found[key] = error
            else:
                self._found[key] = None
        error = self._found.get(key)
        if error is not None:
            raise error

    def _shapes_of(self, spec: JobSpec) -> Mapping[str, Any]:
        key = _data_key(spec)
        if key not in self._shapes:
            self._shapes[key] = source_facts(opened(spec))
        return self._shapes[key]


def _data_key(spec: JobSpec) -> str:
    return json.dumps([encode(spec)["data"], spec.model.keys.get("context"), spec.seed], sort_keys=True, default=repr)


def _model_key(spec: JobSpec) -> str:
    """All that the builder is told."""
    sections, builder = encode(spec), spec.model.builder
    function = None if builder is None else resolve(builder, "model.builder")
    asked = [name for name in sections if name != "data" and function is not None and takes(function, name)]
    told = {name: sections[name] for name in ("model", "experts", *asked)} | {"data": _data_key(spec)}
    return json.dumps(told, sort_keys=True, default=repr)
