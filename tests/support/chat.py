"""A conversation with the real model on a prefill and a decode worker, and all that was counted."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from engine.model_directory import resolve_model
from kvferry.config import BUNDLED_MODEL, load_config
from kvferry.membership import Role
from tests.support.in_process_cluster import InProcessCluster
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.rpc.v1 import inference_pb2 as inference

SAID = (
    "My sister keeps three hens and a very old dog in a garden behind the railway station.",
    "One morning the dog had gone, and the gate stood open. What would you have done first?",
    "We asked the neighbours, the postman and the children who play football in the lane.",
    "In the evening it sat in front of the bakery, as if it had never lived anywhere else.",
    "Now tell me in a few words what a dog wants in a bakery, and whether hens would mind.",
)
ANSWER_TOKENS = 18


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn sent and got. `known` tokens of its prompt are those of the turn before."""

    known: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    usage: inference.Usage


@dataclass(frozen=True, slots=True)
class Chat:
    """A whole conversation, and what the two workers counted in it."""

    turns: tuple[Turn, ...]
    prefill: Mapping[str, int]
    decode: Mapping[str, int]
    bytes_per_token: int


@functools.cache
def chat(page_size: int, kv_return: str) -> Chat:
    """Five turns; each begins when the return of the one before has ended, if there is one."""
    settings = {
        "cache.page_size": str(page_size),
        "cache.memory_bytes": str(128 * 2**20),
        "model.context_length": "1024",
        "cache.audit": "true",
        "handoff.kv_return": kv_return,
    }
    config = load_config(None, {}, settings)
    tokenizer = Tokenizer.from_file(str(resolve_model(BUNDLED_MODEL) / "tokenizer.json"))
    tokens: list[int] = []
    turns: list[Turn] = []
    with InProcessCluster(config, (Role.PREFILL, Role.DECODE)) as cluster:
        layout = cluster.workers[0]._kv_cache.layout
        for text in SAID:
            known = len(tokens)
            tokens += tokenizer.encode(text).ids
            said = cluster.generate(tokens, ANSWER_TOKENS)
            turns.append(Turn(known, tuple(tokens), said.token_ids, said.finish.usage))
            tokens += said.token_ids
            cluster.wait_idle()
            _wait_for_returns(cluster)
        prefill, decode = (dict(worker.snapshot().counters) for worker in cluster.workers)
    return Chat(tuple(turns), prefill, decode, layout.bytes_per_token)


def _wait_for_returns(cluster: InProcessCluster) -> None:
    """Until every offer has been answered by a whole return, or declined."""
    prefill, decode = (worker.snapshot for worker in cluster.workers)

    def ended() -> bool:
        sent = decode().counters.get("offers_sent", 0)
        taken = prefill().counters.get("offers_taken", 0)
        declined = prefill().counters.get("offers_declined", 0)
        adopted = prefill().counters.get("sink_adopted", 0)
        closed = decode().counters.get("source_closed", 0)
        return sent == taken + declined and taken == adopted == closed

    wait_until("ends of returns", ended, state=lambda: (prefill(), decode()))
