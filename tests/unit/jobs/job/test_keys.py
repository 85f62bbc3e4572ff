"""The keys that `raytrain VERB --help` lists."""

from __future__ import annotations

import json

from jobs.job.keys import key_lines
from jobs.job.spec import JobSpec
from raytrain.config.decode import encode


def test_every_key_of_a_section_stands_there_once_with_its_default() -> None:
    lines = key_lines(["loop", "seed"])
    names = [line.partition(" = ")[0] for line in lines]
    assert names[0] == "seed" and len(set(names)) == len(names)
    fields = JobSpec.model_fields["loop"].annotation.model_fields
    assert set(names) == {"seed", *(f"loop.{name}" for name in fields)}
    assert "loop.global_batch_size = 32" in " ".join(lines)


def test_the_defaults_are_those_of_the_schema() -> None:
    spec = JobSpec(model={"builder": "a:b"}, data={"source": "text"})
    shown = {line.partition(" = ")[0]: line.partition(" = ")[2] for line in key_lines(["optim", "save", "retry"])}
    for section in ("optim", "save", "retry"):
        for name, value in encode(getattr(spec, section)).items():
            text = shown[f"{section}.{name}"].partition("  (")[0]
            assert json.loads(text) == value
