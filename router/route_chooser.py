"""Chooses routes by a configured policy, and remembers what it chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from router.policies.catalogue import POLICIES
from router.policies.history import PlacementHistory
from router.policies.pool import Prompt
from router.policy import Placement, cheapest_route, name_hash, weigh

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

    from kvferry.clock import Clock
    from kvferry.ids import WorkerId
    from kvferry.router_config import PolicyName
    from router.policy import ClusterView, CostModel, Demand, Route, Weighing


class RouteChooser:
    """One per router. Of other routers' decisions it knows the prompts that workers tell of."""

    def __init__(
        self, policy: PolicyName, model: CostModel, block_tokens: int, clock: Clock
    ) -> None:
        """`block_tokens` is the size of the blocks whose hashes `choose` is given."""
        self._policy = POLICIES[policy]
        self._model = model
        self._block_tokens = block_tokens
        self._clock = clock
        self._ends = np.empty(0, dtype=np.int64)
        """Tokens of one, two, three... blocks: of the longest prompt so far, twice."""
        self._history = PlacementHistory(
            reads_sent=self._policy.reads_sent, reads_heat=self._policy.reads_heat
        )

    def choose(
        self,
        view: ClusterView,
        demand: Demand,
        hashes: NDArray[np.uint64],
        avoid: frozenset[WorkerId],
        rng: random.Random,
    ) -> Route:
        """A route, which counts as taken. Raises `WorkerUnavailable` when nobody can decode."""
        return self.take(self.weigh(view, demand, hashes, avoid), rng)

    def weigh(
        self,
        view: ClusterView,
        demand: Demand,
        hashes: NDArray[np.uint64],
        avoid: frozenset[WorkerId],
    ) -> Weighing:
        """What every worker would cost; changes nothing. Raises as `choose` does."""
        prompt = self._prompt_of(demand.prompt_tokens, hashes)
        placement = Placement(self._policy, prompt, self._history, self._clock.now())
        return weigh(view, demand, self._model, avoid, placement)

    def take(self, weighing: Weighing, rng: random.Random) -> Route:
        """The cheapest route, which counts as taken."""
        route, placement = cheapest_route(weighing, rng), weighing.placement
        computing = name_hash(route.computing.worker_id)
        prompt, now = placement.prompt, placement.now
        self._history.record(computing, prompt, route.prefill_tokens, route.held_tokens, now)
        return route

    def expect(self, worker_id: WorkerId, hashes: NDArray[np.uint64]) -> None:
        """A worker has accepted a prompt of these blocks, which another router may have sent. One
        that this router sent counts as sent now."""
        prompt = self._prompt_of(hashes.size * self._block_tokens, hashes)
        self._history.expect(name_hash(worker_id), prompt, self._clock.now())

    def _prompt_of(self, tokens: int, hashes: NDArray[np.uint64]) -> Prompt:
        if hashes.size > self._ends.size:
            self._ends = np.arange(1, 2 * hashes.size + 1, dtype=np.int64) * self._block_tokens
            self._ends.flags.writeable = False
        return Prompt(tokens, hashes, self._ends[: hashes.size])
