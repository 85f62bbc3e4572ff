"""The graph of the living experts of a model: how they relate, which concepts they serve, and what can be asked of it.

Nodes are (layer, id). Between two experts there is at most one edge of a type, with a weight from 0 to 1. Each type is
made by one mechanism:

- similarity: the cosine of two experts' outputs on the same replayed rows;
- composition: the share of their rows that two experts answered together, as choices of the same token;
- specialization: two experts whose rows are mostly of the same concept;
- dependency: from a parent to the expert that was born as its copy, made at the birth;
- specialization_split: two experts that a sleep cycle has moved apart since they overlapped.

An edge that no cycle renews fades and goes. Concepts are clusters of replayed rows, with a hierarchy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import networkx as nx

__all__ = ["ExpertGraph"]

EdgeType = Literal["similarity", "specialization", "dependency", "composition", "specialization_split"]
Node = tuple[int, int]
"""(layer, id)."""

EDGE_TYPES: tuple[str, ...] = get_args(EdgeType)
DECAY = 0.9
"""Factor of the weight of an edge that a cycle has not renewed."""
LEAST_WEIGHT = 0.1


@dataclass(frozen=True)
class Link:
    """What a cycle has measured between two experts of a layer; for a dependency, `one` is the parent."""

    layer: int
    one: int
    other: int
    type: EdgeType
    weight: float


class ExpertGraph:
    """Experts and their links, and concepts with theirs.

    Attributes:
        experts: a `networkx.MultiGraph`; the key of an edge is its type. A dependency's `parent` is the older node.
        concepts: a `networkx.DiGraph` from wider concepts to narrower ones. A node is (layer, number) and has `rows`
            (the share of its layer's rows), `centre` and `experts` (id -> share of the concept's rows).

    Example:
        >>> from experts.lifecycle.graph import ExpertGraph, Link
        >>> graph = ExpertGraph()
        >>> graph.set_experts({(0, 0): {"uses": 5}, (0, 1): {"uses": 3}, (0, 2): {"uses": 1}})
        >>> graph.renew([Link(0, 0, 1, "similarity", 0.8), Link(0, 1, 2, "similarity", 0.4)])
        >>> graph.similar((0, 1), 2)
        [((0, 0), 0.8), ((0, 2), 0.4)]
        >>> graph.affinity((0, 0), (0, 1)), graph.central()[0, 1], graph.isolated()
        (0.8, 1.0, [])
        >>> graph.remove((0, 1), heir=(0, 0))  # what bound it to others binds its heir
        >>> graph.similar((0, 0), 2)
        [((0, 2), 0.4)]
        >>> graph.fade()  # a cycle that renews none
        >>> [(edge["type"], round(edge["weight"], 2)) for edge in graph.edges()]
        [('similarity', 0.36)]
        >>> graph.set_concepts(0, centres=[[0.0], [1.0]], rows=[0.7, 0.3], experts=[{0: 1.0}, {2: 1.0}])
        >>> graph.concept_of((0, 2))
        (0, 1)
        >>> ExpertGraph.from_json(graph.to_json()).edges() == graph.edges()
        True
    """

    def __init__(self) -> None:
        self.experts, self.concepts = nx.MultiGraph(), nx.DiGraph()

    # -- experts and edges --------------------------------------------------------------------------

    def set_experts(self, living: Mapping[Node, Mapping[str, Any]]) -> None:
        """Make the nodes equal to the living experts, with their statistics; those that are gone leave without an heir
        unless `remove` has given them one."""
        for node in [node for node in self.experts if node not in living]:
            self.remove(node)
        for node, statistics in living.items():
            self.experts.add_node(node, **statistics)

    def renew(self, links: Iterable[Link]) -> None:
        """Set the weight of each link's edge; weights below `LEAST_WEIGHT` make none and remove none. Raises ValueError
        for an expert that is not in the graph, or one linked to itself."""
        for link in links:
            one, other = (link.layer, link.one), (link.layer, link.other)
            if one == other or one not in self.experts or other not in self.experts:
                raise ValueError(f"{link}: expected two living experts, of {sorted(self.experts)}")
            if link.weight >= LEAST_WEIGHT:
                own = {"parent": one} if link.type == "dependency" else {}
                self.experts.add_edge(one, other, key=link.type, weight=min(1.0, link.weight), **own)

    def fade(self, renewed: Iterable[Link] = ()) -> None:
        """End a cycle: multiply the weight of all edges but the renewed ones by `DECAY`; weak ones go. A link below
        `LEAST_WEIGHT` renews none: what is measured as absent fades too."""
        found = [link for link in renewed if link.weight >= LEAST_WEIGHT]
        kept = {(*sorted([(one.layer, one.one), (one.layer, one.other)]), one.type) for one in found}
        for one, other, kind, edge in list(self.experts.edges(keys=True, data=True)):
            if (*sorted([one, other]), kind) not in kept:
                edge["weight"] *= DECAY
                if edge["weight"] < LEAST_WEIGHT:
                    self.experts.remove_edge(one, other, kind)

    def remove(self, node: Node, *, heir: Node | None = None) -> None:
        """Remove an expert. Its edges become its heir's: weights of edges of one type to one neighbour are added, and
        at most 1; those between the two go. Without an heir its edges go too."""
        if heir is not None:
            for _, other, kind, edge in list(self.experts.edges(node, keys=True, data=True)):
                if other == heir:
                    continue
                held = self.experts.get_edge_data(heir, other, kind) or {"weight": 0.0}
                own = {"parent": heir if edge["parent"] == node else edge["parent"]} if "parent" in edge else {}
                self.experts.add_edge(heir, other, kind, weight=min(1.0, held["weight"] + edge["weight"]), **own)
        self.experts.remove_node(node)
        for _, concept in self.concepts.nodes(data=True):
            share = concept["experts"].pop(node[1], 0.0) if concept["layer"] == node[0] else 0.0
            if share and heir is not None:
                concept["experts"][heir[1]] = concept["experts"].get(heir[1], 0.0) + share

    # -- concepts -----------------------------------------------------------------------------------

    def set_concepts(
        self, layer: int, *, centres: Sequence[Sequence[float]], rows: Sequence[float],
        experts: Sequence[Mapping[int, float]],
    ) -> None:  # fmt: skip
        """Replace the concepts of a layer by clusters of its rows, and build their hierarchy: the two nearest concepts
        without a parent get one between them, weighted by their rows, until one is left.

        Args:
            centres: of each cluster. rows: its share of the rows. experts: id -> share of the cluster's rows.
        """
        self.concepts.remove_nodes_from([node for node in self.concepts if node[0] == layer])
        known: list[_Concept] = []

        def add(concept: _Concept) -> tuple[int, int]:
            known.append(concept)
            centre, share, own = concept
            node = layer, len(known) - 1
            self.concepts.add_node(node, layer=layer, rows=share, centre=centre, experts=own)
            return node

        for centre, share, own in zip(centres, rows, experts, strict=True):
            add((list(centre), share, dict(own)))
        top = list(range(len(known)))
        while len(top) > 1:
            pairs = itertools.combinations(top, 2)
            one, other = min(pairs, key=lambda pair: math.dist(known[pair[0]][0], known[pair[1]][0]))
            wider = add(_wider(known[one], known[other]))
            self.concepts.add_edges_from([(wider, (layer, one)), (wider, (layer, other))])
            top = [left for left in top if left not in (one, other)] + [wider[1]]

    def concept_of(self, node: Node) -> Node | None:
        """The narrowest concept most of whose rows are this expert's, or None."""
        own = [
            (concept["experts"].get(node[1], 0.0) * concept["rows"], name)
            for name, concept in self.concepts.nodes(data=True)
            if name[0] == node[0] and self.concepts.out_degree(name) == 0
        ]
        found = max(own, default=(0.0, None), key=lambda pair: pair[0])
        return found[1] if found[0] > 0 else None

    # -- queries ------------------------------------------------------------------------------------

    def similar(self, node: Node, number: int) -> list[tuple[Node, float]]:
        """The experts most similar to this one, with the weights of their edges, best first."""
        held = [(other, edge["weight"]) for _, other, kind, edge in self.experts.edges(node, keys=True, data=True)
                if kind == "similarity"]  # fmt: skip
        return sorted(held, key=lambda pair: (-pair[1], pair[0]))[:number]

    def central(self) -> dict[Node, float]:
        """The betweenness centrality of each expert: how many of the shortest paths between others lead through it."""
        return nx.betweenness_centrality(nx.Graph(self.experts))

    def isolated(self) -> list[Node]:
        """Experts without any edge, ascending."""
        return sorted(nx.isolates(self.experts))

    def affinity(self, one: Node, other: Node) -> float:
        """The largest weight of an edge between two experts; 0 without one, 1 for the same expert."""
        if one == other:
            return 1.0
        edges = self.experts.get_edge_data(one, other) or {}
        return max((edge["weight"] for edge in edges.values()), default=0.0)

    def edges(self) -> list[dict[str, Any]]:
        """The edges as plain values, in a fixed order."""
        found = [
            {"layer": one[0], "one": min(one, other)[1], "other": max(one, other)[1], "type": kind,
             "weight": edge["weight"]}
            for one, other, kind, edge in self.experts.edges(keys=True, data=True)
        ]  # fmt: skip
        return sorted(found, key=lambda edge: (edge["layer"], edge["one"], edge["other"], edge["type"]))

    # -- JSON ---------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain values, in networkx's node-link form."""
        return {
            "experts": nx.node_link_data(self.experts, edges="edges"),
            "concepts": nx.node_link_data(self.concepts, edges="edges"),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ExpertGraph:
        """The inverse of `to_json`, also after a journey through a file."""
        graph = cls()
        read = (nx.node_link_graph(value[part], edges="edges") for part in ("experts", "concepts"))
        # nodes that JSON has turned into lists, as tuples again
        graph.experts, graph.concepts = (nx.relabel_nodes(one, {node: tuple(node) for node in one}) for one in read)
        for *_, edge in graph.experts.edges(keys=True, data=True):
            if "parent" in edge:
                edge["parent"] = tuple(edge["parent"])
        for _, concept in graph.concepts.nodes(data=True):
            concept["experts"] = {int(expert): share for expert, share in concept["experts"].items()}
        return graph


_Concept = tuple[list[float], float, dict[int, float]]
"""Centre, share of the rows, and id -> share of the concept's rows."""


def _wider(one: _Concept, other: _Concept) -> _Concept:
    """Two concepts as one: their means, weighted by their rows."""
    total = (one[1] + other[1]) or 1.0
    a, b = one[1] / total, other[1] / total
    centre = [a * x + b * y for x, y in zip(one[0], other[0], strict=True)]
    ids = sorted(one[2].keys() | other[2].keys())
    return centre, one[1] + other[1], {e: a * one[2].get(e, 0.0) + b * other[2].get(e, 0.0) for e in ids}
