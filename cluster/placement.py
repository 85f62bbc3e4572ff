"""Where Ray places an actor or a task: on one named node, or on the node of this process."""

from __future__ import annotations

from typing import Any


def on_node(node: str) -> Any:
    """The scheduling strategy for the node of an id and for no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def on_this_node() -> Any:
    """The scheduling strategy of an actor that must live on the node of this process.

    Ray places an actor that reserves nothing on any node; the driver's actors must not die with another node.
    """
    import ray

    return on_node(ray.get_runtime_context().get_node_id())
