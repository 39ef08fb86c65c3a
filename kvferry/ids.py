"""Names for the numbers and strings that identify things. Compared whole, never parsed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NewType, TypeAlias

import numpy as np
from numpy.typing import NDArray

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)

Incarnation = NewType("Incarnation", int)
"""One number per worker process start, never reused: a restarted worker is another worker."""

Attempt = NewType("Attempt", int)
"""1 for the first try of a request; every retry is a new attempt."""

ExtraKey = NewType("ExtraKey", str)
"""Requests with different extra keys (adapter, tenant salt...) never share KV; "" shares."""

AdapterId = NewType("AdapterId", str)
"""A LoRA adapter, by a digest of its files: what a name means may change. See
`kvferry.adapter_files`."""

NO_ADAPTER = AdapterId("")
"""The model as it is."""

TokenIds: TypeAlias = NDArray[np.int32]
"""1-D array of token ids."""

SlotIndices: TypeAlias = NDArray[np.int64]
"""1-D array of physical KV slots, in logical order."""


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """One try of one request. Two tries of a request share nothing but the request id."""

    request_id: RequestId
    attempt: Attempt

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


def new_incarnation() -> Incarnation:
    """A number no other process start has drawn: 63 bits from the operating system."""
    return Incarnation(int.from_bytes(os.urandom(8), "big") >> 1)


def new_request_id() -> RequestId:
    """A fresh id for a request whose client gave none."""
    return RequestId(f"req-{os.urandom(12).hex()}")
