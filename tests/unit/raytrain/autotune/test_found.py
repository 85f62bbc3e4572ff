"""Whether what a search found holds for a run: its signature names what changed."""

from __future__ import annotations

from typing import Any

import pytest
from lab import MLP, MOE, class_rows, make_session, token_rows

from raytrain.autotune.found import refusal, signature_of
from raytrain.config.sections import TuneFound
from raytrain.train.session import Session


def session_of(model: dict[str, Any] = MLP, **sections: Any) -> Session:
    moe = model["builder"].startswith("experts")
    rows = token_rows(16) if moe else class_rows(16)
    loop = {"micro_batch_size": 8, **sections.pop("loop", {})}
    return make_session(model, {"train": rows, "eval_fraction": 0.0}, loop=loop, **sections)


def told(session: Session, other: Session, **found: Any) -> str:
    """What the second session says about what was found for the first one."""
    signature = signature_of(session)
    given = {"precision": "fp32", "micro_batch_size": 8, "step_s": 1.0, **found}
    return refusal(TuneFound(signature=signature.hash, facts=signature.facts, **given), other)


def test_what_changes_neither_time_nor_memory_does_not_count() -> None:
    assert told(session_of(), session_of()) == ""
    assert (
        told(session_of(), session_of(optim={"lr": 0.5})) == told(session_of(), session_of(loop={"max_steps": 7})) == ""
    )
    experts: dict[str, Any] = {"num_experts": 4, "top_k": 2, "hosts": 0}
    one, other = session_of(MOE, experts=experts), session_of(MOE, experts={**experts, "inflight": 2})
    assert told(one, other) == ""
    changed = told(one, session_of(MOE, experts={**experts, "top_k": 1}))
    assert "experts.top_k: 2 -> 1" in changed


@pytest.mark.parametrize(
    ("sections", "found", "words"),
    [
        ({"optim": {"name": "sgd"}}, {}, "the search was for something else (optim.name: adamw -> sgd)"),
        ({"model": {**MLP, "hidden": [5]}}, {}, "model.hidden"),
        ({}, {"micro_batch_size": 4}, "the search found fp32 and 4 rows, this run has fp32 and 8 rows"),
        ({}, {"precision": "bf16"}, "the search found bf16 and 8 rows, this run has fp32 and 8 rows"),
    ],
)
def test_the_refusal_names_what_changed(sections: dict[str, Any], found: dict[str, Any], words: str) -> None:
    assert words in told(session_of(), session_of(**sections), **found)


def test_one_hash_of_several_kinds_of_devices_is_enough() -> None:
    own, other = signature_of(session_of()), signature_of(session_of(), workers=7)
    assert own.hash != other.hash
    given = {"precision": "fp32", "micro_batch_size": 8, "step_s": 1.0, "facts": other.facts}
    assert "workers: 7 -> 1" in refusal(TuneFound(signature=other.hash, **given), session_of())
    assert refusal(TuneFound(signature=other.hash, also=[own.hash], **given), session_of()) == ""
