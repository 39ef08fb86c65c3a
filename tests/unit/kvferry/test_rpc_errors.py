"""Every call ends with a status, whatever its handler ends with."""

from __future__ import annotations

import asyncio

import grpc
import pytest

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
