"""Keys of the replay that contradict others: one message, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from experts.config import ExpertsConfig
from experts.sizes import check_section
from raytrain.errors import InputError


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"lifecycle": {"max_experts": 8, "replay": {"bytes": 900}}}, r"experts\.hosts.*auto.*expected 0.*hold all"),
        ({"hosts": 2, "lifecycle": {"max_experts": 8, "replay": {"bytes": 900}}}, r"experts\.hosts.*got 2.*expected 0"),
        (
            {"hosts": "colocated", "lifecycle": {"max_experts": 8, "replay": {"bytes": 900}}},
            r"experts\.hosts.*colocated",
        ),
        (
            {"lifecycle": {"max_experts": 8, "replay": {"every": 5}}},
            r"experts\.lifecycle\.replay\.bytes.*null with other",
        ),
        (
            {"lifecycle": {"max_experts": 8, "merge": {"similarity": 0.9}}},
            r"experts\.lifecycle\.merge\.similarity.*0\.9 without.*replay\.bytes",
        ),
        ({"hosts": 0, "graph_routing": 1.0}, r"experts\.graph_routing.*max_experts"),
        ({"hosts": 0, "graph_routing": 1.0, "lifecycle": {"max_experts": 8}}, r"experts\.graph_routing.*replay\.bytes"),
    ],
)
def test_a_contradiction_is_named_with_the_key_that_fixes_it(section: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_section(ExpertsConfig.model_validate({"num_experts": 4, **section}))
    whole = {
        "num_experts": 4,
        "hosts": 0,
        "graph_routing": 1.0,
        "lifecycle": {"max_experts": 8, "replay": {"bytes": 900}},
    }
    assert check_section(ExpertsConfig.model_validate(whole)) == 4
    for similarity in (0.95, None):  # the default, as a recorded job spells it out, and no merges
        unused = {"num_experts": 4, "lifecycle": {"max_experts": 8, "merge": {"similarity": similarity}}}
        assert check_section(ExpertsConfig.model_validate(unused)) == 4
