"""The graph of experts: its nodes, how edges fade and move to heirs, its queries against networkx, and its JSON."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import networkx as nx
import pytest

from experts.lifecycle.graph import DECAY, EDGE_TYPES, LEAST_WEIGHT, ExpertGraph, Link


def graph_of(nodes: int, links: list[Link], *, layers: int = 1) -> ExpertGraph:
    graph = ExpertGraph()
    graph.set_experts({(layer, expert): {"uses": expert} for layer in range(layers) for expert in range(nodes)})
    graph.renew(links)
    return graph


def random_links(seed: int, nodes: int, *, share: float = 0.4) -> list[Link]:
    draw = random.Random(seed)
    pairs = [(one, other) for one in range(nodes) for other in range(one + 1, nodes) if draw.random() < share]
    return [Link(0, one, other, draw.choice(EDGE_TYPES), draw.uniform(0.1, 1.0)) for one, other in pairs]  # type: ignore[arg-type]


@pytest.mark.covers("KG-01")
def test_the_nodes_are_the_living_experts_with_their_statistics_after_each_operation() -> None:
    graph = graph_of(3, [Link(0, 0, 1, "similarity", 0.5)], layers=2)
    graph.set_experts({(0, 0): {"uses": 9}, (0, 2): {"uses": 2}, (0, 3): {"uses": 0}, (1, 1): {"uses": 4}})
    assert sorted(graph.experts) == [(0, 0), (0, 2), (0, 3), (1, 1)]
    assert graph.experts.nodes[(0, 0)] == {"uses": 9}
    assert graph.edges() == []
    graph.remove((0, 3), heir=(0, 2))
    assert sorted(graph.experts) == [(0, 0), (0, 2), (1, 1)]
    for link in (Link(0, 0, 7, "similarity", 0.5), Link(0, 2, 2, "similarity", 0.5), Link(1, 1, 0, "similarity", 0.5)):
        with pytest.raises(ValueError, match="expected two living experts"):
            graph.renew([link])


@pytest.mark.covers("KG-03")
@pytest.mark.parametrize("weight", [0.95, 0.4, 0.11])
def test_an_edge_that_is_not_renewed_goes_after_the_cycles_of_the_closed_form(weight: float) -> None:
    graph = graph_of(3, [Link(0, 0, 1, "similarity", weight), Link(0, 1, 2, "composition", weight)])
    cycles = 0
    while graph.affinity((0, 0), (0, 1)):
        graph.fade([Link(0, 2, 1, "composition", weight)])
        cycles += 1
    closed_form = 0
    while weight * DECAY**closed_form >= LEAST_WEIGHT:
        closed_form += 1
    assert cycles == closed_form
    assert graph.affinity((0, 1), (0, 2)) == weight  # renewed in each cycle: it has not faded


def test_an_edge_that_is_measured_as_absent_fades() -> None:
    weak, still = Link(0, 0, 1, "similarity", LEAST_WEIGHT - 0.01), Link(0, 1, 2, "similarity", LEAST_WEIGHT)
    graph = graph_of(3, [Link(0, 0, 1, "similarity", 0.9), Link(0, 1, 2, "similarity", 0.9)])
    for cycle in range(1, 4):
        graph.renew([weak, still])
        graph.fade([weak, still])
        assert graph.affinity((0, 0), (0, 1)) == pytest.approx(0.9 * DECAY**cycle)
        assert graph.affinity((0, 1), (0, 2)) == LEAST_WEIGHT


@pytest.mark.covers("KG-07")
def test_the_edges_of_a_removed_expert_move_to_its_heir_and_keep_their_mass() -> None:
    links = [Link(0, 0, 2, "similarity", 0.3), Link(0, 1, 2, "similarity", 0.4), Link(0, 1, 3, "similarity", 0.6),
             Link(0, 1, 3, "composition", 0.2), Link(0, 0, 1, "similarity", 0.9), Link(0, 1, 4, "dependency", 1.0),
             Link(0, 5, 0, "similarity", 0.8), Link(0, 5, 1, "similarity", 0.7)]  # fmt: skip
    graph = graph_of(6, links)
    graph.remove((0, 1), heir=(0, 0))
    weights = {(edge["one"], edge["other"], edge["type"]): edge["weight"] for edge in graph.edges()}
    assert weights == {
        (0, 2, "similarity"): pytest.approx(0.7),  # added
        (0, 3, "similarity"): 0.6,
        (0, 3, "composition"): 0.2,
        (0, 4, "dependency"): 1.0,
        (0, 5, "similarity"): 1.0,  # at most 1
    }
    assert graph.experts.get_edge_data((0, 0), (0, 4))["dependency"]["parent"] == (0, 0)
    alone = graph_of(6, links)
    alone.remove((0, 1))
    assert {(edge["one"], edge["other"]) for edge in alone.edges()} == {(0, 2), (0, 5)}


@pytest.mark.covers("KG-05")
@pytest.mark.parametrize("seed", range(8))
def test_queries_agree_with_networkx_on_random_graphs(seed: int) -> None:
    nodes = 4 + seed
    links = random_links(seed, nodes, share=0.25)
    graph, plain = graph_of(nodes, links), nx.Graph()
    plain.add_nodes_from((0, node) for node in range(nodes))
    for link in links:
        plain.add_edge((0, link.one), (0, link.other), weight=link.weight, type=link.type)
    assert graph.isolated() == sorted(nx.isolates(plain))
    assert graph.central() == pytest.approx(nx.betweenness_centrality(plain))
    for node in plain:
        near = {other: edge["weight"] for other, edge in plain[node].items() if edge["type"] == "similarity"}
        assert graph.similar(node, 3) == sorted(near.items(), key=lambda pair: -pair[1])[:3]
        for other in plain:
            expected = 1.0 if other == node else plain.edges.get((node, other), {}).get("weight", 0.0)
            assert graph.affinity(node, other) == expected


@pytest.mark.covers("KG-04", "KG-08")
def test_a_graph_is_equal_after_a_journey_through_a_file_and_loads_in_a_clean_process() -> None:
    graph = graph_of(4, [*random_links(3, 4, share=0.9), Link(0, 1, 3, "dependency", 1.0)], layers=2)
    centres = [[0.0, 0.0], [10.0, 0.0], [0.5, 0.0], [10.0, 2.0]]
    shares = [{0: 1.0}, {1: 0.5, 2: 0.5}, {0: 0.8, 3: 0.2}, {1: 1.0}]
    graph.set_concepts(0, centres=centres, rows=[0.4, 0.1, 0.2, 0.3], experts=shares)
    graph.set_concepts(1, centres=centres[:2], rows=[0.5, 0.5], experts=shares[:2])
    parents = {child: parent for parent, child in graph.concepts.edges}
    assert parents[(0, 0)] == parents[(0, 2)] == (0, 4)  # the nearest two first
    assert parents[(0, 1)] == parents[(0, 3)] == (0, 5)
    assert parents[(0, 4)] == parents[(0, 5)] == (0, 6)
    wider = graph.concepts.nodes[(0, 5)]
    assert wider["rows"] == pytest.approx(0.4)
    assert wider["centre"] == pytest.approx([10.0, 1.5])
    assert wider["experts"] == pytest.approx({1: 0.875, 2: 0.125})
    assert graph.concept_of((0, 0)) == (0, 0)
    assert graph.concept_of((0, 1)) == (0, 3)
    text = json.dumps(graph.to_json())
    loaded = ExpertGraph.from_json(json.loads(text))
    assert nx.utils.graphs_equal(loaded.experts, graph.experts)
    assert nx.utils.graphs_equal(loaded.concepts, graph.concepts)
    code = (
        "import json, sys; from experts.lifecycle.graph import ExpertGraph as G; g = G.from_json(json.load(sys.stdin))"
    )
    code += "; assert 'torch' not in sys.modules; print(json.dumps(g.to_json()))"
    again = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, check=True)
    assert json.loads(again.stdout) == json.loads(text)
    graph.remove((0, 3), heir=(0, 1))
    assert graph.concepts.nodes[(0, 2)]["experts"] == {0: 0.8, 1: 0.2}
