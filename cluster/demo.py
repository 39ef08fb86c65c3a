"""`kvferry demo`: a cluster is started, asked three questions, and stopped again."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.client import Client
from cluster.console import stream_answer
from cluster.interrupts import ignore_signals
from cluster.local_cluster import LocalCluster, check_port_free
from cluster.tables import (
    ACCOUNTS_LEGEND,
    accounts_table,
    format_bytes,
    format_table,
    workers_table,
)
from kvferry.convert import accounts_from_wire
from kvferry.rpc.v1 import inference_pb2 as inference

if TYPE_CHECKING:
    from kvferry.clock import Clock
    from kvferry.config import ClusterConfig

_FIRST = "What is the capital of France? Answer in one sentence."
_FOLLOW_UP = "What is it famous for?"
_TOKENS_MAX = 64
_IDLE_TIMEOUT_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Asked:
    title: str
    usage: inference.Usage


def run_demo(config: ClusterConfig, clock: Clock) -> None:
    """Returns when everything is stopped. Raises what starting or asking raises."""
    check_port_free(config.router)
    began = clock.now()
    _say("starting Ray, one router and the workers ... (the first start compiles kernels)")
    cluster = LocalCluster(config, clock)
    try:
        cluster.start()
        _say(f"ready after {clock.now() - began:.1f} s; asking over gRPC at {cluster.address}")
        _say(f"(the OpenAI API is at http://{cluster.http_address}/v1)")
        with Client(cluster.address) as client:
            _say(workers_table(client.cluster_status()))
            asked = _ask_three(client)
            _say(usage_table(asked))
            _say("\nKV slots of the workers, now that nothing runs:")
            _say(accounts_table(_idle_status(client, clock)))
            _say(ACCOUNTS_LEGEND)
    finally:
        with ignore_signals():
            report = cluster.stop()
    if report.killed or report.left:
        _say(f"\nstopped; by force: {report.killed}, left: {report.left}")
    else:
        _say("\nstopped; no process is left")


def usage_table(asked: list[_Asked]) -> str:
    """One row per request: where its prompt came from, and how long it took."""
    header = (
        *("request", "prompt", "hit at prefill", "hit at decode", "moved", "bytes moved"),
        *("handoff ms", "TTFT ms", "ITL ms", "answer tokens"),
    )
    return format_table(
        header,
        (
            (
                *(entry.title, str(entry.usage.prompt_tokens)),
                *(str(entry.usage.prefill_hit_tokens), str(entry.usage.decode_hit_tokens)),
                *(str(entry.usage.moved_tokens), format_bytes(entry.usage.moved_bytes)),
                *(f"{entry.usage.handoff_ms:.1f}", f"{entry.usage.ttft_ms:.0f}"),
                *(f"{entry.usage.itl_ms:.1f}", str(entry.usage.completion_tokens)),
            )
            for entry in asked
        ),
    )


def _idle_status(client: Client, clock: Clock) -> inference.ClusterStatusResponse:
    """The status once every worker has given back what requests held, or after a short while.

    A stream ends before its slots are given back, and routers ask workers at intervals.
    """
    give_up = clock.now() + _IDLE_TIMEOUT_S
    while True:
        status = client.cluster_status()
        accounts = [accounts_from_wire(worker.accounts) for worker in status.workers]
        if clock.now() > give_up or all(account.is_idle for account in accounts):
            return status
        time.sleep(_POLL_S)


def _ask_three(client: Client) -> list[_Asked]:
    """The same question twice, then a follow-up that has it and its answer as its prefix."""
    chat = inference.Chat(messages=[inference.ChatMessage(role="user", content=_FIRST)])
    first, usage = _ask(client, chat)
    asked = [_Asked("question", usage)]
    _, usage = _ask(client, chat)
    asked.append(_Asked("same again", usage))
    chat.messages.add(role="assistant", content=first)
    chat.messages.add(role="user", content=_FOLLOW_UP)
    _, usage = _ask(client, chat)
    asked.append(_Asked("follow-up", usage))
    return asked


def _ask(client: Client, chat: inference.Chat) -> tuple[str, inference.Usage]:
    _say(f"\n> {chat.messages[-1].content}")
    greedy = inference.SamplingParams(temperature=0.0, max_tokens=_TOKENS_MAX)
    request = inference.GenerateRequest(chat=chat, sampling=greedy)
    return stream_answer(client, request, sys.stdout)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201
