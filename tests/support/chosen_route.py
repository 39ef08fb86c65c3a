"""A route from one look at the workers, without a router that remembers it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.policy import cheapest_route, weigh

if TYPE_CHECKING:
    import random

    from kvferry.ids import WorkerId
    from router.policy import ClusterView, CostModel, Demand, Placement, Route


def choose_route(
    view: ClusterView,
    demand: Demand,
    model: CostModel,
    avoid: frozenset[WorkerId],
    rng: random.Random,
    placement: Placement,
) -> Route:
    """The cheapest one; equally cheap ones are drawn at random."""
    return cheapest_route(weigh(view, demand, model, avoid, placement), rng)
