"""Experts that are born, merge and are pruned: the same series wherever they live, killed and resumed at any step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from exchange import Scene
from gang import run_gang
from growing import LIFECYCLE, SCRIPT, act, change_of, disagree, follow, grow, lifecycle_of
from lab import MOE, digest, make_session, token_rows, train
from torch import Tensor

from experts.config import ExpertsConfig, LifecycleConfig
from experts.grouped import state_of
from experts.layer import MoELayer
from experts.lifecycle.changes import change_experts, change_router, newborn
from experts.lifecycle.table import Change, ExpertTable, TableMismatch
from experts.member.commit import StepCommit
from experts.models import moe_layer
from raytrain.runs.folder import RunFolder
from raytrain.train.session import Session

STEPS = 16
EXACT = 1e-12
COLUMNS = ("loss", "aux_loss", "grad_norm", "eval", "counts", "load_imbalance")
ELSEWHERE: dict[str, tuple[int, int | str]] = {
    "1 worker, 1 host": (1, 1), "1 worker, 2 hosts": (1, 2), "1 worker, colocated": (1, "colocated"),
    "2 workers": (2, 0), "2 workers, 1 host": (2, 1), "2 workers, 2 hosts": (2, 2),
    "2 workers, colocated": (2, "colocated"),
}  # fmt: skip
DATA = {"train": token_rows(70)}
EXPERTS = dict(LIFECYCLE)


# ---------------------------------------------------------------- one series, wherever experts live


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return act(0, Scene(1, 0, steps=STEPS))


@pytest.mark.covers("SLP-15", "EXP-15")
@pytest.mark.parametrize("name", list(ELSEWHERE))
def test_wherever_experts_live_they_come_and_go_alike(name: str, reference: dict[str, Any]) -> None:
    workers, hosts = ELSEWHERE[name]
    scene = Scene(workers, hosts, steps=STEPS)
    members = [made[0] for made in run_gang(grow, [scene], world_size=scene.size)]
    for made in members[:workers]:
        assert made["table"] == reference["table"] and made["ids"] == reference["ids"]
        for column in COLUMNS:
            np.testing.assert_allclose(made[column], reference[column], rtol=0, atol=EXACT, err_msg=column)
    assert members[0]["changes"] == reference["changes"]
    assert len(reference["changes"]) == len(SCRIPT)
    for key, value in reference["weights"].items():
        np.testing.assert_allclose(members[0]["weights"][key], value, rtol=0, atol=EXACT, err_msg=key)
    living = [[row["slot"] for row in rows] for rows in reference["table"]["layers"]]
    for layer, slots in enumerate(living):
        open_E = reference["weights"][f"blocks.{layer}.feed_forward.router.open_E"]
        assert np.flatnonzero(open_E).tolist() == sorted(slots)


@pytest.mark.parametrize("hosts", [3, "colocated"])
def test_experts_come_and_go_while_others_move(hosts: int | str, reference: dict[str, Any]) -> None:
    """One placement is under way at each of three changes; another one is not asked for in the step of a change."""
    workers = 2 if hosts == "colocated" else 1
    scene = Scene(workers, hosts, steps=STEPS, moves=((2, 1), (5, 2), (8, 3), (10, 4)))
    made = run_gang(grow, [scene], world_size=scene.size)[0][0]
    assert made["table"] == reference["table"] and not made["refused"]
    assert len({version for _, version in made["in force"]}) >= 5
    for column in COLUMNS:
        np.testing.assert_allclose(made[column], reference[column], rtol=0, atol=EXACT, err_msg=column)
    for key, value in reference["weights"].items():
        np.testing.assert_allclose(made["weights"][key], value, rtol=0, atol=EXACT, err_msg=key)


def test_the_same_workers_train_to_the_bit_on_any_number_of_hosts() -> None:
    for workers, places in ((1, (1, 2, 3)), (2, ("colocated", 1, 2))):
        made = []
        for hosts in places:
            scene = Scene(workers, hosts, steps=STEPS, precision="fp32")
            made.append(run_gang(grow, [scene], world_size=scene.size)[0][0])
        for other in made[1:]:
            assert other["loss"] == made[0]["loss"] and other["grad_norm"] == made[0]["grad_norm"]
            assert digest_of(other["weights"]) == digest_of(made[0]["weights"])


def digest_of(weights: dict[str, np.ndarray]) -> str:
    return digest({name: torch.from_numpy(value) for name, value in weights.items()})


# ---------------------------------------------------------------- killed and resumed


@pytest.mark.parametrize("hosts", [0, 2, "colocated"])
def test_a_run_resumed_at_any_change_and_in_the_step_after_is_the_unbroken_one(
    hosts: int | str, tmp_path: Path
) -> None:
    """With experts on hosts, the resumed run has another number of them."""
    run = RunFolder.create(str(tmp_path), "grown")
    workers = 2 if hosts == "colocated" else 1
    scene = Scene(workers, hosts, steps=STEPS, precision="fp32", every=1, run_path=run.path)
    whole = run_gang(grow, [scene], world_size=scene.size)[0][0]
    others = hosts if isinstance(hosts, str) else 2 * hosts
    again = [replace(scene, hosts=others, every=0, from_step=step) for step in range(2, STEPS)]
    parts = run_gang(grow, again, world_size=again[0].size)[0]
    for step, part in zip(range(2, STEPS), parts, strict=True):
        assert part["loss"] == whole["loss"][step:], f"resumed after step {step}"
        assert part["table"] == whole["table"]
        assert digest_of(part["weights"]) == digest_of(whole["weights"])
        assert part["changes"] == [row for row in whole["changes"] if row["step"] > step]


# ---------------------------------------------------------------- tables that differ


@pytest.mark.parametrize("hosts", [0, "colocated"])
def test_workers_that_want_other_changes_all_end_with_an_error(hosts: int | str) -> None:
    ends = run_gang(disagree, Scene(2, hosts, steps=STEPS), world_size=2)
    assert all("TableMismatch: step 3" in end for end in ends), ends


def test_a_holder_with_another_table_than_rank_0_changes_nothing() -> None:
    """No group is needed: it raises before it exchanges anything."""
    holder = StepCommit(SimpleNamespace(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    holder.table = ExpertTable.start(3, layers=1, slots=5)
    change = Change("prune", 0, (1,), "")
    other = replace(holder.table.after([change], step=4), seed=1)
    with pytest.raises(TableMismatch, match="step 4: a member's table of experts differs from rank 0's"):
        holder.change(4, changes=[change.to_json()], homes={}, table=other.hash())


# ---------------------------------------------------------------- exactness


def layer_of(*, top_k: int, living: int = 3, slots: int = 5) -> MoELayer:
    torch.manual_seed(0)
    cycle = LifecycleConfig(max_experts=slots)
    section = ExpertsConfig(
        num_experts=living, top_k=top_k, lifecycle=cycle, hidden=6, balance="none", z_loss_weight=0.0
    )
    return moe_layer(4, section).double()


def outcome(layer: MoELayer, slots: list[int]) -> list[Tensor]:
    """Output, gradient of the input, and gradients of these experts and their router rows."""
    torch.manual_seed(1)
    x = torch.randn(3, 9, 4, dtype=torch.float64, requires_grad=True)
    layer.zero_grad()
    output, _ = layer(x)
    (output.sin().sum() + output.square().sum()).backward()
    parameters = [layer.router.weight, *layer.experts.parameters()]
    return [output, x.grad, *(one.grad[slots] for one in parameters)]  # type: ignore[index, list-item]


def apply(layer: MoELayer, table: ExpertTable, change: Change) -> ExpertTable:
    change_experts(lambda key: layer.experts.slot(key[1]), [], [change], table, step=1)  # type: ignore[operator]
    change_router(layer.router, [], change, table, step=1)
    return table.after([change], step=1)


def assert_equal(before: list[Tensor], after: list[Tensor]) -> None:
    assert before[0].abs().max() > 1e-6 and all(one.abs().max() > 0 for one in before)
    for one, other in zip(before, after, strict=True):
        assert (one - other).abs().max() <= EXACT


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_birth_that_the_router_keeps_from_all_rows_changes_nothing(top_k: int) -> None:
    layer, table = layer_of(top_k=top_k), ExpertTable.start(3, layers=1, slots=5)
    before = outcome(layer, [0, 1, 2])
    for number in (3, 4):
        table = apply(layer, table, Change("birth", 0, (1, number), "", slot=number, opens=False))
        assert_equal(before, outcome(layer, [0, 1, 2]))
        newcomer, parent = layer.experts.weights_of(number), layer.experts.weights_of(1)  # type: ignore[operator]
        assert all(value.abs().max() > 0 and not torch.equal(value, parent[name]) for name, value in newcomer.items())
    table = apply(layer, table, Change("merge", 0, (1, 3), "", share=1.0))  # it goes again
    assert_equal(before, outcome(layer, [0, 1, 2]))


def test_merging_two_identical_experts_changes_nothing_for_the_others() -> None:
    layer, table = layer_of(top_k=1), ExpertTable.start(3, layers=1, slots=5)
    with torch.no_grad():
        for parameter in (layer.router.weight, *layer.experts.parameters()):
            parameter[2] = parameter[0]
    before = outcome(layer, [1])
    merged_before = [one.grad[[0, 2]].sum(0) for one in layer.experts.parameters()]  # type: ignore[index]
    apply(layer, table, Change("merge", 0, (0, 2), "", share=0.3))
    assert_equal(before, outcome(layer, [1]))
    for one, both in zip(layer.experts.parameters(), merged_before, strict=True):
        assert (one.grad[0] - both).abs().max() <= EXACT and not one.grad[2].any()  # type: ignore[index]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_closed_expert_is_as_one_that_does_not_exist(score: str) -> None:
    """Losses, capacity, bias and counts are those of a router of three experts."""
    routers = []
    for cycle in (LifecycleConfig(), LifecycleConfig(max_experts=7)):
        torch.manual_seed(0)
        section = ExpertsConfig(num_experts=3, top_k=2, score=score, capacity_factor=0.7, lifecycle=cycle)  # type: ignore[arg-type]
        routers.append(moe_layer(4, section).router.double())
    plain, roomy = routers
    with torch.no_grad():
        roomy.weight[:3] = plain.weight
        roomy.bias_E[3:] = 1e3
    x = torch.randn(3, 9, 4, dtype=torch.float64)
    one, other = plain(x), roomy(x)
    assert torch.equal(one.indices_TK, other.indices_TK) and torch.equal(one.kept_TK, other.kept_TK)
    assert other.counts_E.tolist() == [*one.counts_E.tolist(), 0, 0, 0, 0]
    torch.testing.assert_close(one.weights_TK, other.weights_TK, rtol=0, atol=EXACT)
    torch.testing.assert_close(one.aux, other.aux, rtol=0, atol=EXACT)
    for router in routers:
        router.commit(router.pending_counts[: router.num_experts + 1].clone(), skipped=False)
    torch.testing.assert_close(plain.bias_E, roomy.bias_E[:3], rtol=0, atol=EXACT)
    torch.testing.assert_close(plain.shares_E, roomy.shares_E[:3], rtol=0, atol=EXACT)
    assert roomy.bias_E[3:].tolist() == [1e3] * 4 and not roomy.shares_E[3:].any()


def test_the_uncertainty_of_a_router_is_one_for_an_even_choice_and_zero_for_a_sure_one() -> None:
    for living in (2, 3, 5):
        layer = layer_of(top_k=1, living=living)
        layer.router.weight.data.zero_()
        layer(torch.randn(2, 8, 4, dtype=torch.float64))
        assert layer.router.pending_counts[-1].item() == 16 << 20
        layer.router.pending_counts.zero_()
        layer.router.weight.data[1] = 1e3
        layer(torch.ones(2, 8, 4, dtype=torch.float64))
        assert layer.router.pending_counts[-1].item() == 0


# ---------------------------------------------------------------- states follow ids


@pytest.mark.covers("EXP-16")
@pytest.mark.parametrize("seed", range(4))
def test_states_and_statistics_follow_the_ids_through_fifty_random_changes(seed: int) -> None:
    """Every number of an expert is its id; a newcomer gets its own, whoever it was copied from."""
    session = make_session(MOE, DATA, experts={**EXPERTS, "hidden": 4}, loop={"max_steps": 2})
    train(session)
    lifecycle, draw = lifecycle_of(session), np.random.default_rng(seed)
    layers = layers_of(session)
    table, uses = lifecycle.table, [dict.fromkeys(range(4), 0) for _ in layers]

    ended: list[set[int]] = [set() for _ in layers]

    def stamp(layer: int, expert: int, slot: int) -> None:
        for value in rows_of(session, layers[layer], slot):
            value.fill_(expert)

    def check() -> None:
        for layer, own in enumerate(layers):
            slots = table.ids_by_slot(layer)
            assert table.ids(layer) == sorted(uses[layer])
            assert sorted(one for one in slots if one is not None) == table.ids(layer)
            assert {row.id: row.uses for row in table.layers[layer]} == uses[layer]
            assert own.router.open_E.tolist() == [one is not None for one in slots]  # type: ignore[union-attr]
            for row in table.layers[layer]:
                rows = rows_of(session, own, row.slot)
                assert len(rows) == 3 * 3 and all(bool((value == row.id).all()) for value in rows), (layer, row.id)
            for slot in ended[layer] & set(table.free_slots(layer)):
                assert not any(bool(value.any()) for value in rows_of(session, own, slot))

    for layer in range(len(layers)):
        for row in table.layers[layer]:
            stamp(layer, row.id, row.slot)
    table = replace(table, layers=tuple(tuple(replace(row, uses=0) for row in rows) for rows in table.layers))
    for step in range(50):
        layer = int(draw.integers(len(layers)))
        alive = table.ids(layer)
        able = {"birth": table.free_slots(layer), "merge": len(alive) > 2, "prune": len(alive) > 2}
        kind = str(draw.choice([name for name, yes in able.items() if yes]))
        chosen = draw.permutation(alive)[: 2 if kind == "merge" else 1].tolist()
        change = change_of(table, kind, layer, tuple(chosen))
        if kind == "merge":
            change = replace(change, share=1.0)
        change_experts(lifecycle.slot, session.optimizers, [change], table, step=step)
        change_router(layers[layer].router, session.optimizers, change, table, step=step)
        if kind != "birth":
            ended[layer].add(table.slot(layer, change.ids[-1]))
        table = table.after([change], step=step)
        if kind == "birth":
            uses[layer][change.ids[1]] = 0
            stamp(layer, change.ids[1], table.slot(layer, change.ids[1]))
        if kind == "merge":
            uses[layer][change.ids[0]] += uses[layer].pop(change.ids[1])
        if kind == "prune":
            del uses[layer][change.ids[0]]
        rows = draw.integers(1, 100, size=(len(layers), 6)).tolist()
        table = table.count_uses(rows, step=step, least_share=0.0)
        for at, own in enumerate(uses):
            for expert in own:
                own[expert] += rows[at][table.slot(at, expert)]
        check()
    assert max(table.next_ids) > 10, "no id was used twice"


def layers_of(session: Session) -> list[MoELayer]:
    return [part for part in session.trainable.module.modules() if isinstance(part, MoELayer)]


def rows_of(session: Session, layer: MoELayer, slot: int) -> list[Tensor]:
    """An expert's weights and moments, and those of its row of the router."""
    states = [state_of(*layer.experts.slot(slot), session.optimizers)]  # type: ignore[operator]
    weight = layer.router.weight
    held = session.optimizers[0].state[weight]
    states.append({"router": weight.detach()[slot], **{name: held[name][slot] for name in ("exp_avg", "exp_avg_sq")}})
    return [value for state in states for value in state.values() if value.ndim]


@pytest.mark.covers("SLP-07")
def test_a_merge_is_the_mean_of_weights_and_moments_weighted_by_uses() -> None:
    session = make_session(MOE, DATA, experts=EXPERTS, loop={"max_steps": 4}, precision="fp64")
    train(session)
    lifecycle, layer = lifecycle_of(session), layers_of(session)[1]
    table = lifecycle.table.count_uses([[0] * 6, [5, 40, 5, 10, 0, 0]], step=4, least_share=0.0)
    uses = {row.id: row.uses for row in table.layers[1]}
    change = change_of(table, "merge", 1, (1, 3))
    survivor, gone = change.ids
    share = uses[survivor] / (uses[1] + uses[3])
    assert survivor == 1 and 0.5 < share < 1
    one, other = ([value.clone() for value in rows_of(session, layer, slot)] for slot in (survivor, gone))
    change_experts(lifecycle.slot, session.optimizers, [change], table, step=5)
    change_router(layer.router, session.optimizers, change, table, step=5)
    for now, first, second in zip(rows_of(session, layer, survivor), one, other, strict=True):
        torch.testing.assert_close(now, share * first + (1 - share) * second, rtol=0, atol=EXACT)
        assert first.any() and not torch.equal(first, second)
    assert table.after([change], step=5).row(1, survivor).uses == uses[1] + uses[3]


@pytest.mark.covers("EXP-14")
@pytest.mark.parametrize("seed", range(3))
def test_a_newcomer_is_like_its_parent_and_not_the_same(seed: int) -> None:
    torch.manual_seed(seed)
    session = make_session(MOE, DATA, experts=EXPERTS, loop={"max_steps": 4}, seed=seed)
    train(session)
    seen: list[Tensor] = []
    layer = layers_of(session)[0]
    x = torch.randn(500, MOE["width"])
    parent = state_of(*layer.experts.slot(2), session.optimizers)  # type: ignore[operator]
    child = newborn(parent, torch.Generator().manual_seed(seed))
    for state in (parent, child):
        load = {name: value for name, value in state.items() if "." not in name}
        seen.append(torch.nn.functional.gelu(x @ load["w1"].T) @ load["w2"].T)
    cosine = torch.nn.functional.cosine_similarity(seen[0], seen[1])
    assert cosine.min() > 0.9 and cosine.max() < 1.0
    assert not any(value.any() for name, value in child.items() if "exp_avg" in name)
    assert child["w1.step"] == parent["w1.step"]


# ---------------------------------------------------------------- newcomers train


@pytest.mark.covers("LOOP-21")
@pytest.mark.parametrize("optim", ["adamw", "sgd", "muon"])
def test_newcomers_and_their_router_rows_are_trained(optim: str) -> None:
    session = make_session(MOE, DATA, experts=EXPERTS, loop={"max_steps": 9}, optim={"name": optim})
    lifecycle = lifecycle_of(session)
    follow(lifecycle, ((3, "birth", 0, (1,)), (3, "birth", 1, (0,)), (5, "merge", 0, (0, 2))))
    after: dict[int, list[list[Tensor]]] = {}

    def seen(step: int) -> list[Change]:
        parts = layers_of(session)
        after[step] = [
            [value.clone() for value in (part.router.weight.detach()[4], *part.experts.weights_of(4).values())]  # type: ignore[operator]
            for part in parts
        ]
        return wanted(step)

    wanted: Callable[[int], Any] = lifecycle.sleep  # type: ignore[assignment]
    lifecycle.sleep = seen
    train(session)
    owners = [id(one) for opt in session.optimizers for group in opt.param_groups for one in group["params"]]
    trained = [id(one) for one in session.trainable.module.parameters() if one.requires_grad]
    assert sorted(owners) == sorted(trained), "each parameter is in one group"
    for layer in range(2):
        for value, later in zip(after[4][layer], after[8][layer], strict=True):
            assert not torch.equal(value, later), f"layer {layer}"


def test_a_factor_of_the_learning_rate_scales_the_steps_of_one_expert() -> None:
    ends = []
    for factor in (1.0, 0.25):
        session = make_session(MOE, DATA, experts=EXPERTS, loop={"max_steps": 4}, precision="fp64")
        lifecycle = lifecycle_of(session)
        lifecycle.sleep = lambda step, factor=factor: [Change("rate", 0, (1,), "", factor=factor)] if step == 2 else []
        experts = layers_of(session)[0].experts
        before: list[Tensor] = []
        inner = session.step.update

        def update(agreed: Any, *, step: int, inner=inner, before=before, experts=experts) -> float:
            before[:] = [one.detach().clone() for one in experts.parameters()]
            return inner(agreed, step=step)

        session.step.update = update  # type: ignore[method-assign]
        train(session)
        ends.append([one.detach() - old for one, old in zip(experts.parameters(), before, strict=True)])
    for plain, scaled in zip(*ends, strict=True):
        torch.testing.assert_close(scaled[1], 0.25 * plain[1], rtol=1e-6, atol=1e-12)
        assert torch.equal(scaled[0], plain[0]) and plain[1].abs().max() > 0


@pytest.mark.covers("COMP-09")
def test_a_newcomer_is_compiled_and_trained_without_compiling_again() -> None:
    """The graphs and gradients of a compiled layer before and after a birth and a prune, with those of an eager one."""
    made = []
    for compiled in (False, True):
        layer, table = layer_of(top_k=2), ExpertTable.start(3, layers=1, slots=5)
        counters = torch._dynamo.utils.counters
        counters.clear()
        called = torch.compile(layer.router, backend="aot_eager") if compiled else layer.router
        layer.forward = partial(MoELayer.forward, SimpleNamespace(router=called, _route=layer._route))  # type: ignore[arg-type, method-assign]
        results, graphs = [outcome(layer, [0, 1, 2])], [counters["stats"]["unique_graphs"]]
        for change in (Change("birth", 0, (1, 3), "", slot=3), Change("prune", 0, (0,), "")):
            table = apply(layer, table, change)
            results.append(outcome(layer, [1, 2, 3]))
            graphs.append(counters["stats"]["unique_graphs"])
        made.append(results)
        assert (graphs[0] > 0) is compiled and len(set(graphs)) == 1, graphs
    for eager, other in zip(*made, strict=True):
        assert_equal(eager, other)
    assert made[1][1][2][2].any() and made[1][1][3][2].any(), "the newcomer and its row have gradients"


# ---------------------------------------------------------------- decided by the policy


@pytest.mark.covers("EXP-12", "EXP-13")
def test_a_real_run_keeps_bounds_and_cooldown() -> None:
    section = {
        "num_experts": 3, "top_k": 2,
        "lifecycle": {
            "max_experts": 5, "min_experts": 2, "every": 2, "birth": {"uncertainty": 0.0, "cooldown_steps": 6},
            "prune": {"idle_steps": 12, "least_share": 0.12},
        },
    }  # fmt: skip
    session = make_session(MOE, DATA, experts=section, loop={"max_steps": 80})
    reporter, _ = train(session)
    counts = {layer: [3] for layer in range(2)}
    for row in (row for row in reporter.events if row["kind"].startswith("expert_")):
        counts[row["layer"]].append(row["count"])
    for layer, numbers in counts.items():
        born = [row["step"] for row in reporter.events if row["kind"] == "expert_born" and row["layer"] == layer]
        assert len(born) >= 2 and min(np.diff(born)) >= 6
        assert max(numbers) == 5 and min(numbers) >= 2
        assert set(np.abs(np.diff(numbers))) == {1}
    ids = [row["ids"] for row in reporter.intervals]
    living = reporter.of("train", "experts")
    assert living[0] == 3 and living == [sum(one is not None for layer in row for one in layer) / 2 for row in ids]
    assert [[one for one in layer if one is not None] for layer in ids[-1]] == [
        sorted(lifecycle_of(session).table.ids(layer), key=lifecycle_of(session).table.ids_by_slot(layer).index)
        for layer in range(2)
    ]


@pytest.mark.covers("EXP-11")
@pytest.mark.parametrize(("threshold", "births"), [(0.99, False), (0.3, True)])
def test_the_threshold_decides_and_an_untrained_router_gives_no_birth(threshold: float, births: bool) -> None:
    section = {
        "num_experts": 3, "top_k": 2, "balance": "none", "z_loss_weight": 0.0,
        "lifecycle": {"max_experts": 8, "every": 5, "birth": {"uncertainty": threshold, "cooldown_steps": 10}},
    }  # fmt: skip
    session = make_session(MOE, DATA, experts=section, loop={"max_steps": 80}, optim={"lr": 0.02})
    reporter, _ = train(session)
    born = [row["step"] for row in reporter.events if row["kind"] == "expert_born"]
    assert bool(born) is births
    assert not born or min(born) > 6, "the router has learnt nothing in its first interval"
