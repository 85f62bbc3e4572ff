"""The keys that `raytrain VERB --help` lists."""

from __future__ import annotations

import json

from jobs.job.keys import key_entries
from jobs.job.spec import JobSpec
from raytrain.config.decode import encode


def test_every_key_of_a_section_is_listed_once_with_its_default() -> None:
    entries = dict(key_entries(["loop", "seed"]))
    names = [entry.partition(" = ")[0] for entry in entries]
    assert names[0] == "seed" and len(set(names)) == len(names)
    fields = JobSpec.model_fields["loop"].annotation.model_fields
    assert set(names) == {"seed", *(f"loop.{name}" for name in fields)}
    assert (
        entries["loop.global_batch_size = 32"]
        == "samples per optimizer step, over all workers (an integer >= 1 or auto)"
    )


def test_the_defaults_are_those_of_the_schema() -> None:
    spec = JobSpec(model={"builder": "a:b"}, data={"source": "text"})
    shown = dict(entry.split(" = ", 1) for entry, _ in key_entries(["optim", "save", "retry"]))
    for section in ("optim", "save", "retry"):
        for name, value in encode(getattr(spec, section)).items():
            assert json.loads(shown[f"{section}.{name}"]) == value
