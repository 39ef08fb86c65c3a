from __future__ import annotations

import numpy as np
import pytest

from kv_transfer.protocol import messages as m
from kv_transfer.protocol.key import HandoffKey
from kv_transfer.wire import message_from_wire, message_to_wire
from kvferry.attempt_marks import PromptMarks
from kvferry.cache_key import CacheUse, Sharing
from kvferry.errors import ErrorKind, InvalidInput
from kvferry.generation import OutputToken, TokenLogprobs
from kvferry.ids import AdapterId, Attempt, ExtraKey, Incarnation, RequestId, WorkerId
from kvferry.rpc.v1 import handoff_pb2 as pb
from kvferry.sampling import SamplingParams

KEY = HandoffKey(RequestId("r1"), Attempt(3), Incarnation(2**63 - 1), Incarnation(5))

USE = CacheUse(ExtraKey("salt"), Sharing.PRIVATE, -3, AdapterId("5a1e"))

MESSAGES = [
    m.Hello(WorkerId("w"), Incarnation(2**63 - 1), "hash", 2**40, 8, 4, "host"),
    m.Ready(KEY, 20, "hash", 8, 4),
    m.Grant(KEY, 16, 2**40),
    m.Busy(KEY),
    m.FirstToken(KEY, (OutputToken(7), OutputToken(8))),
    m.FirstToken(KEY, (OutputToken(7, TokenLogprobs(7, -0.5, ((7, -0.5), (9, -2.0)))),)),
    m.Complete(KEY, 20, 3),
    m.Complete(KEY, 20, None),
    m.Complete(KEY, 20, 3, PromptMarks(0.5, 1.0, 0.0, 2.0)),
    m.Received(KEY),
    m.Closed(KEY),
    m.Abort(KEY, "because"),
    m.Abort(KEY, "full", ErrorKind.OVERLOADED),
    m.Aborted(KEY),
    m.LinkRendezvous(2, 3, "0/0", b"\x00\xff"),
    m.LinkSignal(2, 3, m.Signal.CREDIT, 8),
    m.LinkSignal(2, 0, m.Signal.SENDING, 2**40),
    m.LinkDown(2, "gap"),
]


def through_bytes(message):
    data = message_to_wire(message).SerializeToString()
    return message_from_wire(pb.HandoffMessage.FromString(data))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message):
    assert through_bytes(message) == message


def test_prefill_survives_the_wire():
    sampling = SamplingParams(temperature=0.5, seed=2**64 - 1, stop=("a",), logit_bias={3: -1.0})
    prompt = np.array([1, 2**31 - 1], np.int32)
    sent = m.Prefill(KEY, prompt, sampling, USE, "hash", held_only=True, goes_first=True)
    came = through_bytes(sent)
    assert (came.held_only, came.goes_first) == (True, True)
    assert came.prompt.dtype == np.int32
    assert came.prompt.tolist() == sent.prompt.tolist()
    assert came.sampling == sampling
    assert (came.key, came.cache_use, came.layout_hash) == (KEY, USE, "hash")


def test_an_offer_survives_the_wire():
    sent = m.KvOffer(KEY, "127.0.0.1:1", np.array([1, 2**31 - 1], np.int32), USE)
    came = through_bytes(sent)
    assert came.tokens.dtype == np.int32
    assert came.tokens.tolist() == sent.tokens.tolist()
    assert (came.key, came.address, came.cache_use) == (KEY, "127.0.0.1:1", USE)


def test_every_kind_of_the_wire_is_read():
    kinds = {field.name for field in pb.HandoffMessage.DESCRIPTOR.oneofs_by_name["kind"].fields}
    read = {message_to_wire(message).WhichOneof("kind") for message in MESSAGES}
    read |= {"prefill", "kv_offer"}
    assert kinds == read


def test_an_unknown_kind_is_refused():
    with pytest.raises(InvalidInput, match="kind None"):
        message_from_wire(pb.HandoffMessage())


def test_an_abort_of_a_kind_from_a_newer_worker_is_a_plain_failure():
    message = message_to_wire(m.Abort(KEY, "because"))
    message.abort.kind = "on fire"
    assert message_from_wire(message) == m.Abort(KEY, "because")


@pytest.mark.parametrize("token_id", [2**31, 2**32 - 1])
def test_token_ids_beyond_int32_are_refused(token_id):
    likely = TokenLogprobs(7, -0.5, ((token_id, -0.5),))
    for token in (OutputToken(token_id), OutputToken(7, likely)):
        with pytest.raises(InvalidInput, match=str(token_id)):
            through_bytes(m.FirstToken(KEY, (token,)))


def test_link_generations_count_from_one():
    with pytest.raises(InvalidInput, match="generations count from 1"):
        through_bytes(m.LinkRendezvous(0, 0, "0/0", b""))
