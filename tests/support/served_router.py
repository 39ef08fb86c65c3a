"""A router with its front doors and fake workers on a loop of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.router_bench import RouterBench, eventually, router_bench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.fake_worker import FakeWorker


@contextmanager
def served_router(directory: Path, *workers: FakeWorker, **settings: Any) -> Iterator[RouterBench]:
    """Serves until the end of the context; fails there if a request is left in the router."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    stack = AsyncExitStack()
    try:
        bench = run(stack.enter_async_context(router_bench(directory, *workers, **settings)))
        yield bench
        run(eventually(lambda: bench.router.requests_in_flight == 0))
    finally:
        run(stack.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
