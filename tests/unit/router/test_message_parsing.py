from __future__ import annotations

import pytest

from kvferry.errors import InvalidInput
from kvferry.rpc.v1 import handoff_pb2, inference_pb2, worker_pb2
from router.api.message_parsing import parse_message

BROKEN = b"\xff\xfe"


def field(number: int, data: bytes) -> bytes:
    """One length-delimited field in wire format."""
    return bytes([number << 3 | 2, len(data)]) + data


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (field(1, BROKEN), "request_id"),
        (field(2, BROKEN), "model"),
        (field(3, BROKEN), "text"),
        (
            field(5, field(1, field(1, b"user")) + field(1, field(2, BROKEN))),
            r"chat.messages[1].content",
        ),
        (field(6, field(12, b"fine") + field(12, BROKEN)), r"sampling.stop[1]"),
        (field(6, field(8, b"\x08\x01") + field(12, BROKEN)), r"sampling.stop[0]"),
    ],
)
def test_a_string_that_is_not_utf8_is_named(data: bytes, path: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_message(inference_pb2.GenerateRequest, data)
    assert (caught.value.field, caught.value.problem) == (path, "is not valid UTF-8")


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(InvalidInput, match="request: is not a valid GenerateRequest"):
        parse_message(inference_pb2.GenerateRequest, field(3, b"x" * 9)[:-4])


def test_a_good_message_is_itself() -> None:
    message = inference_pb2.GenerateRequest(text="é", sampling={"logit_bias": {3: 1.5}})
    assert parse_message(inference_pb2.GenerateRequest, message.SerializeToString()) == message


def test_keys_of_maps_are_searched_too() -> None:
    entry = field(7, field(1, BROKEN) + b"\x10\x01")
    with pytest.raises(InvalidInput, match=r"^counters\[0\]\.key"):
        parse_message(worker_pb2.WorkerStatusResponse, entry)


def test_true_bytes_fields_may_hold_anything() -> None:
    rendezvous = handoff_pb2.LinkRendezvous(store_value=BROKEN).SerializeToString()
    with pytest.raises(InvalidInput, match=r"^store_key: is not valid UTF-8"):
        parse_message(handoff_pb2.LinkRendezvous, rendezvous + field(3, BROKEN))
