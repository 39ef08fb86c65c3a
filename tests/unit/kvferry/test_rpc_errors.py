"""Every call ends with a status, whatever its handler ends with."""

from __future__ import annotations

import asyncio
import gc
import weakref

import grpc
import pytest

from kvferry.errors import WorkerUnavailable
from kvferry.rpc_errors import status_of_errors


class Context:
    """Of a call: notes how it was ended."""

    def __init__(self):
        self.status = None

    async def abort(self, status, details, trailing):
        self.status = status


def test_a_cancellation_that_is_not_the_calls_own_ends_it_with_a_status():
    context = Context()

    async def handler():
        async with status_of_errors(context):
            raise asyncio.CancelledError

    asyncio.run(handler())
    assert context.status is grpc.StatusCode.INTERNAL


def test_a_call_whose_client_is_gone_just_ends():
    context = Context()

    async def handler():
        async with status_of_errors(context):
            await asyncio.sleep(60)

    async def main():
        task = asyncio.ensure_future(handler())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert context.status is None


class KeepingContext(Context):
    """Keeps what a call was aborted with, as gRPC does until the next call."""

    async def abort(self, status, details, trailing):
        self.status = status
        self.kept = RuntimeError("aborted")
        raise self.kept


class Held:
    """Something large that a request has."""


def test_what_a_refused_call_held_is_free_at_once():
    context, held = KeepingContext(), []

    async def answers():
        large = Held()
        held.append(weakref.ref(large))
        try:
            raise WorkerUnavailable("gone")
        except WorkerUnavailable as error:
            raise WorkerUnavailable("still gone") from error

    async def handler():
        async with status_of_errors(context):
            await answers()

    with pytest.raises(RuntimeError):
        asyncio.run(handler())
    gc.collect()
    assert context.kept.__traceback__ is not None
    assert held[0]() is None
