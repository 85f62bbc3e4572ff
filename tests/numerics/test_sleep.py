"""Sleep cycles in real runs: when they happen, what they replay and change, and that runs with them resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gang import run_gang
from lab import Rows, class_rows, digest, make_session, optimizer_state, token_rows, train

from experts.lifecycle import sleep as sleep_module
from experts.lifecycle.replayed_model import ReplayedModel, answer_of, row_losses, row_uncertainty
from experts.lifecycle.sleep import SleepCycle, next_threshold, steps_to_next
from experts.lifecycle.table import Change
from experts.router import TopKRouter
from raytrain.checkpoint.reader import load
from raytrain.execution.checkpointer import CheckpointSaver
from raytrain.runs.folder import RunFolder
from raytrain.train.parallel.collectives import Workers
from raytrain.train.session import Session
from raytrain.train.state import Clock

REPLAY = {"bytes": 9_000, "every": 12, "rows": 96, "batch_size": 32, "lr": 0.003}
CYCLE = {
    "max_experts": 6, "every": 10, "birth": {"uncertainty": 0.9, "cooldown_steps": 20},
    "prune": {"idle_steps": 20, "least_share": 0.05}, "merge": {"similarity": 0.8}, "replay": REPLAY,
}  # fmt: skip


def session_of(
    *, replay: dict[str, Any] | None = None, workers: Workers | None = None, steps: int = 60, model: str = "mlp",
    top_k: int = 2, lr: float = 0.003, graph_routing: float = 0.0, noise: float = 0.0,
    extra: dict[str, torch.Tensor] | None = None, loop: dict[str, Any] | None = None, **cycle: Any,
) -> Session:  # fmt: skip
    torch.manual_seed(5)
    section = {**CYCLE, **cycle, "replay": {**REPLAY, **(replay or {})}}
    experts = {"num_experts": 3, "top_k": top_k, "hosts": 0, "hidden": 16, "lifecycle": section,
               "graph_routing": graph_routing, "noise": noise}  # fmt: skip
    sizes: dict[str, Any] = {"builder": "experts.models:moe_mlp", "width": 16, "layers": 2, "num_features": 12,
                             "num_classes": 4}  # fmt: skip
    rows = {**class_rows(1_000), **(extra or {})}
    if model == "gpt":
        sizes = {"builder": "experts.models:moe_gpt", "layers": 2, "heads": 2, "width": 16, "context": 12,
                 "vocab_size": 31, "dropout": 0.1}  # fmt: skip
        rows = token_rows(300, ragged=True)
    return make_session(
        sizes, {"train": rows, "eval_fraction": 0.0}, workers=workers, experts=experts,
        loop={"max_steps": steps, "global_batch_size": 32, **(loop or {})}, optim={"lr": lr},
    )  # fmt: skip


def sleep_of(session: Session) -> SleepCycle:
    found = session.trainable.state_parts()["sleep"]  # type: ignore[misc]
    assert isinstance(found, SleepCycle)
    return found


def cycles_of(reporter: Rows) -> list[dict[str, Any]]:
    return [event for event in reporter.events if event["kind"] == "sleep_cycle"]


# ---------------------------------------------------------------- when


def slept(rank: int, world_size: int, noise: float) -> dict[str, Any]:
    session = session_of(workers=Workers(), noise=noise)
    seen: list[int] = []
    sleep = sleep_of(session)
    run = sleep.run
    sleep.run = lambda step, training: (seen.append(step), run(step, training))[1]  # type: ignore[method-assign]
    reporter, _ = train(session)
    return {
        "steps": seen, "losses": reporter.losses, "table": sleep.living.table.to_json(),
        "weights": digest(session.trainable.module.state_dict()), "kept": digest(sleep.reservoir.state_dict()),
        "moments": digest(optimizer_state(session)), "generator": digest(torch.get_rng_state()),
        "next": [cycle["next_step"] for cycle in cycles_of(reporter)],
    }  # fmt: skip


@pytest.mark.covers("SLP-01", "SLP-14")
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_cycle_happens_in_the_scheduled_step_on_both_workers_and_leaves_them_equal(noise: float) -> None:
    """Also where each worker draws noise of its own, before a cycle and after it."""
    first, second = run_gang(slept, noise, world_size=2)
    assert len(first["steps"]) >= 3
    assert first["steps"] == second["steps"] == [12, *first["next"][:-1]], "the first one, and then as announced"
    assert first["next"] == second["next"] or not second["next"]
    for name in ("weights", "kept", "table", "moments"):
        assert first[name] == second[name], name
    assert first["generator"] != second["generator"]


@pytest.mark.covers("SLP-02")
@pytest.mark.parametrize(
    ("living", "expected"), [(1, 2000), (2, 2000), (3, 1333), (4, 1000), (5, 800), (8, 500), (40, 500)]
)
def test_more_experts_sleep_sooner_within_bounds(living: int, expected: int) -> None:
    assert steps_to_next(1000, living=living, first=4) == expected


@pytest.mark.covers("SLP-12")
def test_the_birth_threshold_keeps_births_in_their_band() -> None:
    assert next_threshold(0.7, births=40, steps=1000) > 0.7
    assert next_threshold(0.7, births=5, steps=1000) == 0.7
    assert next_threshold(0.7, births=0, steps=1000) < 0.7
    assert next_threshold(0.99, births=40, steps=1000) == 1.0
    assert next_threshold(0.05, births=0, steps=1000) == 0.05
    threshold, rates = 0.5, []
    for _ in range(60):  # a model that gives birth more often the lower the threshold is
        births = int(40 * (1 - threshold))
        rates.append(births)
        threshold = next_threshold(threshold, births=births, steps=1000)
    assert all(0.5 <= rate <= 10 for rate in rates[-20:])


@pytest.mark.parametrize(("most", "moves"), [(3, False), (4, True)])
def test_the_threshold_stays_while_no_layer_has_room(most: int, moves: bool) -> None:
    session = session_of(
        max_experts=most, birth={"uncertainty": 0.9, "cooldown_steps": 1_000}, merge={"similarity": None},
        prune={"idle_steps": None}, every=1_000, steps=12,
    )  # fmt: skip
    reporter, _ = train(session)
    (cycle,) = cycles_of(reporter)
    assert cycle["born"] == 0 and cycle["living_after"] == [3, 3]
    assert (cycle["threshold"] is not None) is moves


def test_a_birth_that_is_decided_in_the_step_of_a_cycle_happens_before_it() -> None:
    session = session_of(
        replay={"every": 10, "lr": 1e-6}, every=10, birth={"uncertainty": 0.0, "cooldown_steps": 1}, steps=10,
        merge={"similarity": None}, prune={"idle_steps": None},
    )  # fmt: skip
    reporter, _ = train(session)
    (cycle,) = cycles_of(reporter)
    born = [(event["step"], event["layer"]) for event in reporter.events if "most rows" in event.get("reason", "")]
    assert born == [(10, 0), (10, 1)] and cycle["living_before"] == [4, 4]
    assert not sleep_of(session).living.pending


def test_the_controller_reaches_the_births_of_a_run() -> None:
    births = {}
    for name, threshold in (("always", 0.0), ("never", 1.0)):
        session = session_of(birth={"uncertainty": threshold, "cooldown_steps": 10})
        reporter, _ = train(session)
        births[name] = sum(
            event["kind"] == "expert_born" and "uncertainty" in event["reason"] for event in reporter.events
        )
        found = [cycle["threshold"] for cycle in cycles_of(reporter)]
        assert found[-1] == session.trainable.state_parts()["lifecycle"].threshold  # type: ignore[misc]
    assert births["always"] > 2 * births["never"]


# ---------------------------------------------------------------- what


@pytest.mark.covers("SLP-13", "SLP-05")
@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.parametrize("targets", ["labels", "teacher"])
def test_a_cycle_replays_kept_rows_and_leaves_one_complete_record(model: str, targets: str) -> None:
    limit = 9_000 if model == "mlp" else 100_000
    session = session_of(model=model, replay={"targets": targets, "bytes": limit})
    reporter, _ = train(session)
    cycles = cycles_of(reporter)
    assert [cycle["cycle"] for cycle in cycles] == list(range(1, len(cycles) + 1)) and len(cycles) >= 3
    changes = [event for event in reporter.events if event["kind"] in ("expert_born", "expert_merged", "expert_pruned")]
    for cycle in cycles:
        assert 0 < cycle["rows"] <= 96 and cycle["batches"] == -(-cycle["rows"] // 32)
        assert cycle["kept_bytes"] <= limit and cycle["seconds"] > 0
        assert sum(cycle["uncertainty"]) == cycle["rows"], "a histogram of the replayed rows"
        assert max(cycle["uncertainty"]) > cycle["rows"] / 10, "which is not uniform"
        assert len(cycle["living_after"]) == len(cycle["living_before"]) == 2
        done = [event for event in changes if event["step"] == cycle["step"] and "uncertainty" not in event["reason"]]
        counted = [
            sum(event["kind"] == kind for event in done) for kind in ("expert_merged", "expert_pruned", "expert_born")
        ]
        assert counted == [cycle["merged"], cycle["pruned"], cycle["born"]]
    if targets == "labels":
        assert all(cycle["loss_replayed"] < cycle["loss_before"] for cycle in cycles)
    kept = sleep_of(session).reservoir
    assert ("teacher_logits" in kept.columns) == (targets == "teacher")
    assert kept.uncertainty().max() <= 1 and kept.uncertainty().min() >= 0


@pytest.mark.parametrize("targets", ["labels", "teacher"])
def test_a_column_that_the_model_does_not_take_is_not_kept(targets: str) -> None:
    session = session_of(extra={"weight_of_row": torch.ones(1_000)}, replay={"targets": targets}, steps=12)
    reporter, _ = train(session)
    (cycle,) = cycles_of(reporter)
    assert cycle["rows"] == 96
    assert set(sleep_of(session).reservoir.columns) - {"teacher_logits"} == {"x", "labels"}


@pytest.mark.covers("SLP-04")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("targets", ["labels", "teacher"])
def test_replay_lowers_the_loss_on_old_rows_that_were_held_out(seed: int, targets: str) -> None:
    losses = {}
    old, new = class_rows(1_400, seed=seed), class_rows(700, seed=seed + 10)
    old["x"][:, :3] += 3.0
    new["x"][:, :3] -= 3.0
    new["labels"] = (new["labels"] + 1) % 4
    for every in (15, 10_000):
        session = session_of(replay={"every": every, "bytes": 20_000, "rows": 300, "targets": targets},
                             birth={"uncertainty": 1.0}, steps=120)  # fmt: skip
        loss, sleep = session.trainable.loss, sleep_of(session)
        rows = iter(_batches(old, 700, times=60) + _batches(new, 700, times=60))

        def staged(module: torch.nn.Module, batch: Any, loss: Any = loss, sleep: Any = sleep, rows: Any = rows) -> Any:
            return loss(module, batch if sleep.recorder.asleep or not module.training else next(rows))

        session.trainable.loss = staged
        train(session)
        session.trainable.module.eval()
        held_out = {name: value[700:] for name, value in old.items()}
        with torch.no_grad():
            losses[every] = float(loss(session.trainable.module, held_out).loss)
    assert losses[15] < (0.9 if targets == "labels" else 1.0) * losses[10_000], losses


def _taught(
    labels: torch.Tensor, teacher: torch.Tensor | None, *, steps: int = 1, at_once: int = 256
) -> tuple[list[torch.Tensor], float]:
    """The weights after some replays towards a teacher, and the squared error of the answers that are left."""
    session = session_of()
    sleep, held = sleep_of(session), {"x": class_rows(64)["x"], "labels": labels}
    model = ReplayedModel(session.step, sleep.living, sleep.layers, 1, at_once=at_once)
    for group in session.optimizers[0].param_groups:
        group["lr"] = 0.003
    for _ in range(steps):
        model.replay(held, teacher, lr=0.003, size=64)
    session.trainable.module.eval()
    with torch.no_grad():
        answers = answer_of(session.step, held)[0]
    left = 0.0 if teacher is None else float((answers - teacher).square().mean())
    return [one.detach().clone() for one in session.trainable.module.parameters()], left


def test_a_teacher_of_numbers_is_followed_in_its_numbers() -> None:
    teacher = torch.full((64, 4), 2.0)  # as probabilities of classes it says nothing
    labels = torch.zeros(64, 4)
    assert _taught(labels, teacher, steps=100)[1] < 0.5 * _taught(labels, teacher, steps=0)[1]


def test_a_teacher_is_not_followed_where_there_is_no_label() -> None:
    labels = class_rows(64)["labels"].clone()
    labels[:16] = -100
    teachers = [torch.randn(64, 4, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    teachers[1][:16] *= -9.0
    teachers[2][16:] *= -9.0
    plain, masked, counted = (_taught(labels, teacher)[0] for teacher in teachers)
    assert all(torch.equal(a, b) for a, b in zip(plain, masked, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, counted, strict=True))


def _batches(rows: dict[str, torch.Tensor], number: int, *, times: int) -> list[dict[str, torch.Tensor]]:
    return [
        {name: value[:number][torch.arange(32 * n, 32 * n + 32) % number] for name, value in rows.items()}
        for n in range(times)
    ]


def test_the_uncertainty_of_a_row_is_one_minus_the_probability_of_its_labels() -> None:
    logits = torch.tensor([[[4.0, 1.0], [0.0, 0.0]], [[0.0, 2.0], [1.0, 1.0]]])
    labels = torch.tensor([[0, 1], [1, -100]])
    found = row_uncertainty(row_losses(logits, labels))
    shares = logits.softmax(-1)
    assert found[0] == pytest.approx(1 - float((shares[0, 0, 0] * shares[0, 1, 1]).sqrt()), abs=1e-6)
    assert found[1] == pytest.approx(1 - float(shares[1, 0, 1]), abs=1e-6)


# ---------------------------------------------------------------- the experts


@pytest.mark.covers("SLP-06")
def test_planted_twins_merge_in_a_cycle_and_strangers_do_not() -> None:
    session = session_of(
        replay={"every": 4, "lr": 1e-6},
        merge={"similarity": 0.99},
        birth={"uncertainty": 1.0},
        steps=4,
        top_k=1,
        lr=1e-6,
    )
    for layer, router in zip(sleep_of(session).layers, sleep_of(session).routers, strict=True):
        with torch.no_grad():
            router.weight[2], router.bias_rate = router.weight[0], 0.0
            layer.w1.normal_()
            layer.w2.normal_(std=0.1)
            layer.w1[2], layer.w2[2] = layer.w1[0][torch.arange(16).flip(0)], layer.w2[0][:, torch.arange(16).flip(0)]
    sleep = sleep_of(session)
    before: list[float] = []
    replay = sleep._merge

    def watched(brain: Any, found: Any, held: Any, layer: int, view: Any) -> None:
        before.append(brain.loss(held))
        replay(brain, found, held, layer, view)
        before.append(brain.loss(held))

    sleep._merge = watched  # type: ignore[method-assign]
    reporter, _ = train(session)
    (cycle,) = cycles_of(reporter)
    assert cycle["merged"] == 2, cycle["undone"]
    merges = [event for event in reporter.events if event["kind"] == "expert_merged"]
    assert [sorted(event["ids"]) for event in merges] == [[0, 2], [0, 2]]
    assert before[1] <= 1.01 * before[0] and before[3] <= 1.01 * before[2]
    assert sleep.living.table.ids(0) in ([0, 1], [1, 2])


def test_a_merge_that_raises_the_loss_is_undone_to_the_bit() -> None:
    digests = {}
    for similarity in (-1.0, None):
        session = session_of(replay={"every": 40, "rows": 60}, birth={"uncertainty": 1.0}, steps=40, max_experts=3,
                             merge={"similarity": 0.5 if similarity else None})  # fmt: skip
        sleep = sleep_of(session)
        if similarity:  # every pair is alike enough
            sleep.config = sleep.config.model_copy(
                update={"merge": sleep.config.merge.model_copy(update={"similarity": -1.0})}
            )
            forgetful = sleep._merge

            def strict(*given: Any, forgetful: Any = forgetful) -> None:
                given[0].loss_calls = iter([1.0] + [2.0] * 20)
                given[0].loss = lambda batch: next(given[0].loss_calls)
                forgetful(*given)
                del given[0].loss

            sleep._merge = strict  # type: ignore[method-assign]
        reporter, _ = train(session)
        (cycle,) = cycles_of(reporter)
        assert cycle["merged"] == 0 and bool([one for one in cycle["undone"] if "merge" in one]) == bool(similarity)
        digests[similarity] = digest(session.trainable.module.state_dict(), optimizer_state(session))
    assert digests[-1.0] == digests[None]


@pytest.mark.covers("SLP-09")
def test_overlapping_experts_are_moved_apart_where_that_lowers_the_overlap() -> None:
    from experts.lifecycle.measures import shared_rows

    session = session_of(
        replay={"every": 20, "lr": 1e-6}, merge={"similarity": None}, birth={"uncertainty": 1.0}, steps=20
    )
    sleep = sleep_of(session)
    split, seen = sleep._split, []

    def watched(brain: Any, found: Any, held: Any, layer: int) -> Any:
        def overlap() -> torch.Tensor:
            view = brain.view(held)[layer]
            return shared_rows(view.scores_TE, view.chosen_TK)

        before, loss = overlap(), brain.loss(held)
        links = split(brain, found, held, layer)
        seen.append((before, overlap(), loss, brain.loss(held), links))
        return links

    sleep._split = watched  # type: ignore[method-assign]
    reporter, _ = train(session)
    (cycle,) = cycles_of(reporter)
    assert cycle["split"] >= 1
    for before, after, loss, later, links in seen:
        for link in links:
            assert before[link.one, link.other] > 0.3
            assert after[link.one, link.other] < before[link.one, link.other]
            assert later <= 1.01 * loss
    kinds = {edge["key"] for edge in cycle["graph"]["experts"]["edges"]}
    assert "specialization_split" in kinds


@pytest.mark.covers("SLP-08")
def test_a_dormant_expert_is_pruned_in_a_cycle_down_to_the_minimum() -> None:
    session = session_of(
        replay={"every": 24}, every=1_000, prune={"idle_steps": 20, "least_share": 0.9}, min_experts=2,
        merge={"similarity": None}, birth={"uncertainty": 1.0}, steps=24,
    )  # fmt: skip
    reporter, _ = train(session)
    (cycle,) = cycles_of(reporter)
    assert cycle["pruned"] == 2 and cycle["living_after"] == [2, 2]
    assert 0 < cycle["pruned_share"] < 2, "the router's mass on them"
    pruned = [event for event in reporter.events if event["kind"] == "expert_pruned"]
    assert [(event["step"], event["count"]) for event in pruned] == [(24, 2), (24, 2)]


def test_a_cycle_between_two_decisions_prunes_no_expert_in_use_and_counts_each_row_once() -> None:
    session = session_of(
        replay={"every": 24}, every=30, prune={"idle_steps": 20, "least_share": 0.05}, min_experts=2,
        merge={"similarity": None}, birth={"uncertainty": 1.0}, steps=30, max_experts=3,
    )  # fmt: skip
    reporter, _ = train(session)
    (cycle,) = cycles_of(reporter)
    assert cycle["pruned"] == 0 and cycle["living_after"] == [3, 3]
    for rows in sleep_of(session).living.table.layers:
        assert sum(row.uses for row in rows) == 30 * 32 * 2
        assert {row.used for row in rows} <= {24, 30}


@pytest.mark.covers("SLP-10")
@pytest.mark.parametrize(("better", "stays"), [(0.5, False), (2.0, True)])
def test_a_specialist_stays_only_where_it_lowers_the_loss_by_the_margin(
    better: float, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep_module, "BETTER", better)
    session = session_of(replay={"every": 20}, merge={"similarity": None}, birth={"uncertainty": 1.0}, steps=20)
    reporter, _ = train(session)
    (cycle,) = cycles_of(reporter)
    born = [event for event in reporter.events if event["kind"] == "expert_born"]
    assert (cycle["born"], len(born)) == ((1, 1) if stays else (0, 0))
    assert bool([one for one in cycle["undone"] if "specialist" in one]) is not stays
    if stays:
        assert "a specialist for" in born[0]["reason"] and born[0]["layer"] == 1
        slot = sleep_of(session).living.table.slot(1, 3)
        assert sleep_of(session).routers[1].open_E[slot]  # type: ignore[index]


@pytest.mark.covers("SLP-11")
def test_the_learning_rate_of_a_specialist_reaches_the_optimizer() -> None:
    session = session_of(replay={"every": 20}, birth={"uncertainty": 1.0}, merge={"similarity": None}, steps=21)
    sleep = sleep_of(session)
    before: dict[int, torch.Tensor] = {}
    run = sleep.run

    def planted(step: int, training: Any) -> Any:
        found = run(step, training)
        table = sleep.living.table
        rows = tuple(
            __import__("dataclasses").replace(row, rate=0.0 if row.id == 1 else row.rate) for row in table.layers[0]
        )
        sleep.living.table = __import__("dataclasses").replace(table, layers=(rows, *table.layers[1:]))
        before.update({slot: sleep.layers[0].w1[slot].detach().clone() for slot in range(3)})
        return found

    sleep.run = planted  # type: ignore[method-assign]
    reporter, _ = train(session)
    (cycle,) = cycles_of(reporter)
    assert all(0.5 <= rate <= 1.0 for rates in cycle["rates"] for rate in rates.values())
    assert min(rate for rates in cycle["rates"] for rate in rates.values()) < 1.0
    moved = [float((sleep.layers[0].w1[slot].detach() - before[slot]).abs().max()) for slot in range(3)]
    assert moved[1] == 0.0 and min(moved[0], moved[2]) > 0.0


def test_the_statistics_of_a_slot_end_with_its_expert() -> None:
    session = session_of(replay={"every": 100}, every=100, steps=8)
    train(session)
    living = sleep_of(session).living
    before = living.rows_since()
    assert all(before[layer][slot] > 0 for layer in range(2) for slot in range(3))
    living.request([Change("prune", 0, (1,), ""), Change("merge", 1, (0, 2), "")])
    living.carry_out(8)
    after = living.rows_since()
    assert after[0][:3] == [before[0][0], 0.0, before[0][2]]
    assert after[1][:3] == [before[1][0] + before[1][2], before[1][1], 0.0]
    E = len(before[0]) + 1
    assert living.loads.used[1] == living.loads.used[E + 2] == 0 and living.loads.used[E] == 8


# ---------------------------------------------------------------- memory, and several workers


def _limited(session: Session, most: int, *, runs: int = 10**9) -> list[int]:
    """Has the model run out of memory in a cycle with more rows than `most`, `runs` times at most; returns the rows of
    each pass of a cycle, as they come."""
    seen: list[int] = []
    module, recorder = session.trainable.module, sleep_of(session).recorder
    failed: list[int] = []

    def forward(_: Any, args: Any, given: dict[str, Any]) -> None:
        number = len(next(iter([*args, *given.values()])))
        if not recorder.asleep:
            return
        seen.append(number)
        if number > most and len(failed) < runs:
            failed.append(number)
            raise torch.OutOfMemoryError("no room")

    module.register_forward_pre_hook(forward, with_kwargs=True)
    return seen


@pytest.mark.parametrize("targets", ["labels", "teacher"])
def test_a_cycle_takes_no_more_rows_at_once_than_a_step(targets: str) -> None:
    session = session_of(replay={"targets": targets}, loop={"micro_batch_size": 8}, steps=36)
    seen = _limited(session, 10**9)
    reporter, _ = train(session)
    assert max(seen) == 8 and {cycle["rows_at_once"] for cycle in cycles_of(reporter)} == {8}
    assert max(cycle["rows"] for cycle in cycles_of(reporter)) > 32, "and replays more in a batch"


@pytest.mark.parametrize("teacher", [None, torch.randn(64, 4, generator=torch.Generator().manual_seed(1))])
def test_a_replayed_batch_in_uneven_parts_is_one_step(teacher: torch.Tensor | None) -> None:
    labels = class_rows(64)["labels"].clone()
    labels[10:25] = -100
    whole, parts = (_taught(labels, teacher, steps=3, at_once=rows)[0] for rows in (256, 20))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_cycle_without_memory_starts_again_with_half_of_the_rows_at_once() -> None:
    """Its first try fails near its end, after a replay, two prunes and measured uncertainties."""
    results = []
    for short in (False, True):
        session = session_of(
            replay={"every": 24}, every=1_000, prune={"idle_steps": 20, "least_share": 0.9}, min_experts=2,
            birth={"uncertainty": 1.0}, merge={"similarity": None}, loop={"micro_batch_size": 8}, steps=30,
        )  # fmt: skip
        sleep = sleep_of(session)
        look, run, tries = sleep._look, sleep.run, []

        def fails_once(*args: Any, look: Any = look, tries: list[int] = tries) -> Any:
            tries.append(1)
            if len(tries) == 1:
                raise torch.OutOfMemoryError("no room")
            return look(*args)

        def smaller(step: int, training: Any, run: Any = run, sleep: SleepCycle = sleep) -> Any:
            sleep.recorder.micro_batch = 4
            return run(step, training)

        if short:
            sleep._look = fails_once  # type: ignore[method-assign]
        else:
            sleep.run = smaller  # type: ignore[method-assign]
        reporter, _ = train(session)
        (cycle,) = cycles_of(reporter)
        assert cycle["rows_at_once"] == 4 and cycle["pruned"] == 2 and cycle["rows"] == 48
        lines = [one for one in cycle["undone"] if one.startswith("all: ")]
        assert len(lines) == short and all("rank 0: OutOfMemoryError: no room" in one for one in lines)
        pruned = [event for event in reporter.events if event["kind"] == "expert_pruned"]
        assert len(pruned) == cycle["pruned"], "those of the first try are not told"
        same = {name: value for name, value in cycle.items() if name not in ("undone", "seconds")}
        state = [digest(session.trainable.module.state_dict()), digest(optimizer_state(session))]
        results.append([same, state, digest(sleep.reservoir.state_dict()), sleep.living.state_dict()["json"]])
    assert results[0] == results[1]


def test_a_cycle_that_does_not_fit_at_all_is_left_out_and_says_so() -> None:
    states = {}
    for every in (12, 10_000):
        session = session_of(replay={"every": every}, steps=14, loop={"micro_batch_size": 8})
        seen = _limited(session, 0)
        reporter, outcome = train(session)
        assert outcome.kind == "done"
        states[every] = [digest(session.trainable.module.state_dict()), digest(optimizer_state(session))]
        for cycle in cycles_of(reporter):
            assert seen == [8, 4, 2, 1] and cycle["rows"] == 0 and len(cycle["undone"]) == 4
            assert cycle["next_step"] == 24 and cycle["living_after"] == [3, 3]
            assert len(cycle["graph"]["experts"]["nodes"]) == 6, "the report draws it"
    assert states[12] == states[10_000]


def _slept_apart(rank: int, world_size: int, what: str) -> dict[str, Any]:
    session = session_of(workers=Workers(), steps=14, merge={"similarity": None}, birth={"uncertainty": 1.0})
    sleep = sleep_of(session)
    if what == "memory" and rank == 1:
        _limited(session, 8, runs=1)
    if what == "decisions":  # a specialist stays on rank 0, and goes on rank 1, whose losses rise with it
        sleep_module.BETTER, inner = 2.0, ReplayedModel.loss
        factor = 10.0 if rank else 1.0
        losses = ReplayedModel.losses
        ReplayedModel.losses = lambda self, batch: losses(self, batch) * (1 + 0.01 * rank)  # type: ignore[method-assign]
        ReplayedModel.loss = lambda self, batch: inner(self, batch) * factor ** len(self.living.table.ids(1))  # type: ignore[method-assign]
    reporter, _ = train(session)
    (cycle,) = cycles_of(reporter)
    return {
        "state": [digest(session.trainable.module.state_dict()), digest(optimizer_state(session)),
                  digest(sleep.reservoir.state_dict()), sleep.living.table.to_json(), sleep.graph.to_json()],
        "born": cycle["born"], "rows_at_once": cycle["rows_at_once"], "losses": reporter.losses,
    }  # fmt: skip


@pytest.mark.parametrize("what", ["memory", "decisions"])
def test_workers_that_differ_in_a_cycle_go_on_with_the_same_state(what: str) -> None:
    first, second = run_gang(_slept_apart, what, world_size=2)
    assert first["state"] == second["state"]
    if what == "memory":
        assert first["rows_at_once"] == second["rows_at_once"] == 8, "of micro-batches of 16"
    else:
        assert (first["born"], second["born"]) == (1, 0), "else they did not differ"


def test_the_rows_of_an_interval_are_those_of_the_experts_in_it() -> None:
    session = session_of(replay={"every": 100}, every=100, steps=8, loop={"log_every": 100})
    train(session)
    living = sleep_of(session).living
    loads = living.loads
    loads.window = torch.arange(1.0, 15.0, dtype=torch.float64)  # 2 layers of 6 slots, and what each has dropped
    living.request([Change("prune", 0, (1,), ""), Change("merge", 1, (0, 2), "")])
    living.carry_out(8)
    assert loads.window.tolist() == [1, 0, 3, 4, 5, 6, 7, 8 + 10, 9, 0, 11, 12, 13, 14]


# ---------------------------------------------------------------- the graph


@pytest.mark.covers("KG-01", "KG-02")
def test_the_graph_of_a_run_has_the_living_experts_and_edges_of_every_type() -> None:
    kinds: set[str] = set()
    for cycle in ({}, {"merge": {"similarity": None}, "birth": {"uncertainty": 0.0, "cooldown_steps": 5}}):
        session = session_of(**cycle, steps=80)
        sleep = sleep_of(session)
        run = sleep.run

        def checked(step: int, training: Any, run: Any = run, sleep: Any = sleep) -> Any:
            found = run(step, training)
            living = {(layer, row.id) for layer, rows in enumerate(sleep.living.table.layers) for row in rows}
            assert set(sleep.graph.experts) == living
            return found

        sleep.run = checked  # type: ignore[method-assign]
        reporter, _ = train(session)
        for record in cycles_of(reporter):
            kinds |= {edge["key"] for edge in record["graph"]["experts"]["edges"]}
        living = {(layer, row.id) for layer, rows in enumerate(sleep.living.table.layers) for row in rows}
        assert set(sleep.graph.experts) == living, "changes outside of cycles reach it too"
    assert kinds == {"similarity", "composition", "dependency", "specialization_split", "specialization"}


@pytest.mark.covers("KG-06")
def test_the_graph_shifts_the_choices_of_a_router_to_linked_experts_and_only_where_it_is_asked_to() -> None:
    shares = {}
    for weight in (0.0, 4.0):
        session = session_of(
            replay={"every": 20}, merge={"similarity": None}, birth={"uncertainty": 1.0}, steps=20, top_k=1,
            graph_routing=weight,
        )  # fmt: skip
        sleep = sleep_of(session)
        train(session)
        router = sleep.routers[0]
        x = torch.randn(400, 1, 16, generator=torch.Generator().manual_seed(1))
        assert (router.prior_EE is None) == (weight == 0.0)
        with torch.no_grad():
            shares[weight] = router.eval()(x).counts_E
            scores = router.scores(x).squeeze(1)
        if router.prior_EE is not None:
            wanted = (scores + scores @ router.prior_EE + router.bias_E)[:, :3].argmax(1)
            assert torch.equal(torch.bincount(wanted, minlength=6), shares[weight])
            for a in range(3):
                for b in range(3):
                    linked = a != b and sleep.graph.affinity((0, a), (0, b)) > 0
                    assert (float(router.prior_EE[a, b]) > 0) == linked
            again = session_of(replay={"every": 20}, steps=20, top_k=1, graph_routing=weight)
            sleep_of(again).living.table = sleep.living.table
            sleep_of(again).load_state_dict(sleep.state_dict())
            assert torch.equal(sleep_of(again).routers[0].prior_EE, router.prior_EE)  # type: ignore[arg-type]
            alone = session_of(steps=20, top_k=1, graph_routing=weight).trainable.module  # as `infer` builds it
            alone.load_state_dict(session.trainable.module.state_dict())
            routed = [part for part in alone.modules() if isinstance(part, TopKRouter)]
            assert torch.equal(routed[0].eval()(x).counts_E, shares[weight])
    moved = int((shares[4.0] - shares[0.0]).abs().sum()) / 2
    assert moved > 20, shares


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("from_step", [11, 12, 13, 30])
def test_a_run_resumed_around_a_cycle_is_the_unbroken_one_bit_for_bit(tmp_path: Path, from_step: int) -> None:
    def attempt(folder: Path, *, resume: int | None) -> tuple[Rows, str]:
        session = session_of()
        run = RunFolder(str(folder))
        if resume is not None:
            session.restore(load(run.checkpoint_dir(resume)))
        saver = CheckpointSaver(session, run, every=1, keep="all", asynchronous=False, reporter=Rows(), clock=Clock(),
                                fence=None)  # fmt: skip
        reporter, _ = train(session, saver=None if resume else saver)
        saver.close()
        sleep = sleep_of(session)
        state = digest(session.trainable.module.state_dict(), optimizer_state(session), sleep.state_dict())
        return reporter, state

    whole, state = attempt(tmp_path, resume=None)
    resumed, again = attempt(tmp_path, resume=from_step)
    assert resumed.losses == whole.losses[from_step:]
    assert again == state
    later = [cycle["step"] for cycle in cycles_of(whole) if cycle["step"] > from_step]
    assert [cycle["step"] for cycle in cycles_of(resumed)] == later and later


def test_without_replay_no_row_is_kept_and_nothing_is_hooked_in() -> None:
    section = {name: value for name, value in CYCLE.items() if name not in ("replay", "merge")}
    session = make_session(
        {"builder": "experts.models:moe_mlp", "width": 16, "layers": 2, "num_features": 12, "num_classes": 4},
        {"train": class_rows(200), "eval_fraction": 0.0},
        experts={"num_experts": 3, "top_k": 2, "hosts": 0, "hidden": 16, "lifecycle": section},
        loop={"max_steps": 20},
    )
    assert session.trainable.sleep is None
    assert "sleep" not in session.trainable.state_parts()  # type: ignore[misc]
    assert session.trainable.loss.__module__ == "experts.models"
