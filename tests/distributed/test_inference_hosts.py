"""Answers of a run whose experts were trained on hosts: on hosts of each worker, or all in one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jobs.__main__ import main
from jobs.infer import infer
from raytrain.errors import InputError

ROWS, UNIT, FEW = 64, 8, 32
GUEST = Path(__file__).parent / "guest" / "expert_answers.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With prompts, and a job with two expert hosts."""
    made = tmp_path_factory.mktemp("hosts")
    words = ["rain", "falls", "on", "roofs", "while", "foxes", "quietly", "jump", "over", "lazy", "dogs"]
    text = " ".join(np.random.default_rng(0).choice(words, size=900))
    (made / "text.txt").write_text(text)
    job = {
        "name": "hosts", "model": {"builder": "experts.models:moe_gpt", "layers": 2, "heads": 2, "width": 32,
                                   "context": 64},
        "data": {"source": "text", "path": str(made / "text.txt")}, "experts": {"hosts": 2, "num_experts": 4},
        "precision": {"dtype": "fp32"}, "loop": {"max_steps": 20, "global_batch_size": 8},
        "scale": {"workers": 1, "threads": 1}, "telemetry": {"tensorboard": False},
    }  # fmt: skip
    (made / "job.yaml").write_text(json.dumps(job))
    prompts = [text[7 * row : 7 * row + 3 + row % 17] for row in range(ROWS)]
    parquet.write_table(pa.table({"text": prompts}), made / "in.parquet")
    return made


@pytest.fixture(scope="module")
def given(folder: Path, shared_driver: Any) -> dict[str, Any]:
    """What `jobs.infer.infer` is called with in all processes."""
    run = shared_driver.train(folder / "job.yaml", cwd=folder, timeout=200)
    overrides = [f"infer.input={folder / 'in.parquet'}", f"infer.unit_rows={UNIT}", "infer.batch_size=4",
                 "scale.threads=1", "infer.prompt_field=text", "infer.max_new_tokens=24",
                 "infer.temperature=1"]  # fmt: skip
    return {"run": str(run), "overrides": overrides}


@pytest.mark.timeout(590)
def test_experts_on_hosts_answer_as_in_one_process_also_after_the_death_of_a_host(
    folder: Path, given: dict[str, Any], shared_driver: Any
) -> None:
    alone = infer(given["run"], output=str(folder / "alone"), overrides=given["overrides"], quiet=True)
    assert alone.rows == ROWS and [worker["worker"] for worker in alone.summary["workers"]] == ["this process"]
    (folder / "given.json").write_text(json.dumps({**given, "few": FEW}))
    shutil.copy(GUEST, folder)
    printed = shared_driver.run_script(folder / GUEST.name, timeout=200)
    assert "SEEN " in printed, printed
    seen = json.loads(printed.rpartition("SEEN ")[2].splitlines()[0])
    assert seen["killed"] and 2 <= seen["killed"][0] < ROWS // UNIT, "no host was killed in the middle"
    first, hosts, two = (
        parquet.read_table(folder / name / "predictions.parquet") for name in ("alone", "hosts", "two")
    )
    assert len(set(first["prediction"].to_pylist())) > ROWS // 2
    assert hosts.equals(first) and two.equals(first.slice(0, FEW))
    assert [worker["units"] for worker in seen["hosts"]["workers"]] == [ROWS // UNIT], "only its host was replaced"
    assert seen["workers"] == 2, (
        "both have begun, each with its host, before either computes; one may compute all units"
    )
    assert sum(worker["units"] for worker in seen["two"]["workers"]) == FEW // UNIT


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "in each worker (a copy fits, which is faster; experts.hosts=2 uses hosts as in training)"),
        (("experts.hosts=0",), "in each worker (experts.hosts)"),
        (("cluster.memory_limit=400000",), "on 2 hosts beside each worker (as in training: a copy needs about "),
        (("experts.hosts=3",), "on 3 hosts beside each worker (experts.hosts)"),
    ],
)
def test_the_plan_says_where_the_experts_are_and_why(
    given: dict[str, Any], capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["infer", given["run"], *given["overrides"], *overrides, "--dry-run"])
    assert ended.value.code == 0
    assert f"experts: {said}" in capsys.readouterr().out


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("experts.hosts=2", "infer.stages=2"), r"experts\.hosts: got 2 with infer\.stages 2, expected 0 with stages"),
        (("experts.hosts=2", "infer.quantize=int8"), r"experts\.hosts: got 2 with infer\.quantize int8"),
        (("experts.hosts=colocated",), r"experts\.hosts: got colocated, expected the number of hosts of each worker"),
    ],
)
def test_hosts_beside_what_they_do_not_go_with_are_refused(
    given: dict[str, Any], tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        infer(given["run"], output=str(tmp_path / "out"), overrides=[*given["overrides"], *overrides], quiet=True)
    assert not (tmp_path / "out").exists()
