"""What one peer says of another one's handoff changes nothing."""

from __future__ import annotations

import numpy as np

from kv_transfer.events import MessageCame
from kv_transfer.protocol.messages import Complete
from kv_transfer.protocol.states import SinkState
from tests.support.sim_moves import deliver
from tests.support.sim_properties import fingerprint
from tests.support.sim_rest import drain
from tests.support.sim_scenario import Scenario
from tests.support.sim_world import WorkerSetup

SETTLING = (
    *("fetch 2", "open session", "messages", "schedule r1", "messages"),
    *("compute r1 to 2", "messages"),
)


def test_a_peer_whose_links_are_down_does_not_end_what_rides_on_anothers():
    scenario = Scenario()
    for command in SETTLING:
        scenario._do(command)
    world, decode = scenario.world, scenario.at("decode")
    ((key, handoff),) = decode.driver._sink._handoffs.items()
    assert handoff.core.state is SinkState.SETTLING

    other = world._new_worker("other", WorkerSetup("other", page_size=2, slots=16))
    world.workers.append(other)
    world.fetch(world.new_request(np.arange(3, dtype=np.int32)), other, decode)
    drain(world, lambda move: move.do())
    pair = world.pairs[-1]
    pair.greet(other)
    drain(world, lambda move: move.do())
    while pair.sink.wire:
        deliver(pair.source, pair.sink)
        drain(world, lambda move: move.do())

    before = fingerprint(decode)
    unknown = decode.driver.counters["unknown_messages"]
    decode.driver.handle(MessageCame(pair.sink, Complete(key, 8, 1)))
    assert fingerprint(decode) == before
    assert decode.driver.counters["unknown_messages"] == unknown + 1
