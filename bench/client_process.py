"""One client process: `python -m bench.client_process`, started by `bench.client_pool`.

Lines of JSON. In: the plan; then the monotonic time of the start; then nothing, or anything else,
or the end of the input: stop now. Out: `ready` with the number of requests; `ended`, how many did;
at last `requests`, the columns of those that were begun, or `problem`, what is wrong in the plan.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from bench.datasets import workload_of
from bench.grpc_endpoint import GrpcEndpoint
from bench.http_endpoint import HttpEndpoint
from bench.plan import Door, plan_of_json
from bench.sender import Sender
from kvferry.clock import MonotonicClock
from kvferry.errors import InvalidInput
from kvferry.router_config import API_KEY_VARIABLE

if TYPE_CHECKING:
    from bench.answer import Endpoint
    from bench.plan import RunPlan

PROGRESS_INTERVAL_S = 0.2


def main() -> int:
    """Until the part of the run is over, or there is nobody left to tell."""
    # Ctrl-C reaches the whole group; whoever started this one decides what comes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = plan_of_json(sys.stdin.readline())
    try:
        asyncio.run(_serve(plan))
    except InvalidInput as error:
        _tell({"problem": [error.field, error.problem]})
        return 1
    return 0


async def _serve(plan: RunPlan) -> None:
    workload = workload_of(plan.dataset, plan.seed, plan.endpoint.vocab_size)
    endpoint = endpoint_of(plan)
    try:
        sender = Sender(plan, workload, endpoint, MonotonicClock())
        _tell({"ready": sender.requests})
        start_at = float(await asyncio.to_thread(sys.stdin.readline) or "nan")
        if math.isnan(start_at):  # nobody is there any more
            return
        running = asyncio.create_task(sender.run(start_at))
        _stop_on_input(running)
        await _until_ended(running, sender)
        columns = [answer.columns(start_at) for answer in sender.answers]
        _tell({"requests": columns, "interrupted": running.cancelled()})
    finally:
        await endpoint.close()


def endpoint_of(plan: RunPlan) -> Endpoint:
    """Within a running loop. Raises `InvalidInput`."""
    api_key = os.environ.get(API_KEY_VARIABLE, "")
    if plan.endpoint.door is Door.HTTP:
        return HttpEndpoint(plan.endpoint, api_key)
    return GrpcEndpoint(plan.endpoint, api_key)


async def _until_ended(running: asyncio.Task[None], sender: Sender) -> None:
    while not running.done():
        await asyncio.wait([running], timeout=PROGRESS_INTERVAL_S)
        _tell({"ended": sender.ended})
    if not running.cancelled():
        running.result()


def _stop_on_input(running: asyncio.Task[None]) -> None:
    loop = asyncio.get_running_loop()

    def wait() -> None:
        sys.stdin.readline()
        if not loop.is_closed():
            loop.call_soon_threadsafe(running.cancel)

    threading.Thread(target=wait, daemon=True).start()


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # The thread that waits for input holds its lock, which an orderly exit would want.
    os._exit(code)
