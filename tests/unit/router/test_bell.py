from __future__ import annotations

import asyncio

import pytest

from kvferry.errors import RequestCancelled
from router.bell import Bell

LONG_S = 1e6


def test_a_ring_wakes_all_who_listen_and_is_over() -> None:
    async def main() -> None:
        bell = Bell()
        bell.ring()
        waits = [asyncio.create_task(bell.listen().wait(LONG_S)) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(wait.done() for wait in waits)
        bell.ring()
        await asyncio.gather(*waits)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bell.listen().wait(LONG_S), 0.01)

    asyncio.run(main())


def test_a_ring_between_listening_and_waiting_counts() -> None:
    async def main() -> None:
        bell = Bell()
        listener = bell.listen()
        bell.ring()
        await listener.wait(LONG_S)

    asyncio.run(main())


def test_without_a_ring_a_wait_ends_in_its_time() -> None:
    async def main() -> None:
        listener = Bell().listen()
        await listener.wait(0.001)
        # What comes too late is neither raised nor lost in a warning.
        listener.abort(RequestCancelled("late"))
        listener.wake()

    asyncio.run(main())


def test_an_aborted_wait_raises_once_it_is_waited_for() -> None:
    async def main() -> None:
        listener = Bell().listen()
        listener.abort(RequestCancelled("enough"))
        with pytest.raises(RequestCancelled, match="enough"):
            await listener.wait(LONG_S)

    asyncio.run(main())
