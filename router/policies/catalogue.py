"""The policies by the names under which they are configured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.router_config import PolicyName
from router.policies.approximate_tree import approximate_tree
from router.policies.block_cost import block_cost
from router.policies.consistent_hashing import consistent_hashing_bounded
from router.policies.least_loaded import least_loaded
from router.policies.min_ttft import min_ttft
from router.policies.overlap_logit import overlap_logit
from router.policies.priced_time import priced_time
from router.policies.random_choice import random_choice
from router.policies.round_robin import round_robin

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from router.policies.pool import PoolView, Prompt


@dataclass(frozen=True, slots=True)
class Policy:
    """How the worker that computes a prompt is chosen."""

    costs: Callable[[PoolView, Prompt], NDArray[np.float64]]
    """One per worker, the least is taken; pure."""
    is_time: bool = False
    """Costs are milliseconds: the decode worker's may be added, and the pair chosen jointly."""
    reads_sent: bool = False
    """Reads `PoolView.sent_tokens`."""
    reads_heat: bool = False
    """Reads `PoolView.heat`."""


POLICIES = {
    PolicyName.PRICED_TIME: Policy(priced_time, is_time=True, reads_heat=True),
    PolicyName.MIN_TTFT: Policy(min_ttft, is_time=True),
    PolicyName.ROUND_ROBIN: Policy(round_robin),
    PolicyName.RANDOM: Policy(random_choice),
    PolicyName.LEAST_LOADED: Policy(least_loaded),
    PolicyName.CONSISTENT_HASHING: Policy(consistent_hashing_bounded),
    PolicyName.APPROXIMATE_TREE: Policy(approximate_tree, reads_sent=True),
    PolicyName.OVERLAP_LOGIT: Policy(overlap_logit),
    PolicyName.BLOCK_COST: Policy(block_cost),
}
