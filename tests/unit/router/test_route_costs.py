"""The compiled loops of a decision, each by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from router.route_costs import cheapest

TIE = 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_each_of_the_cheapest_is_drawn_by_its_share(seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.choice([3.0, 3.0 + TIE / 2, 3.1, 8.0]) for _ in range(rng.randrange(1, 12))]
    equals = [each for each, cost in enumerate(costs) if cost <= min(costs) + TIE]
    columns = np.array(costs)
    for number, position in enumerate(equals):
        for part in (0.0, 0.5, 0.999):
            draw = (number + part) / len(equals)
            assert cheapest(columns, TIE, draw) == position


def test_the_last_of_the_cheapest_is_drawn_by_the_largest_number_below_one() -> None:
    for count in (1, 2, 3, 7, 49, 1000):
        assert cheapest(np.zeros(count), TIE, float(np.nextafter(1.0, 0.0))) == count - 1
