"""Constrained answers of the real model, over gRPC: always of their language, wherever computed."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import grpc
import jsonschema
import pytest

from kvferry.config import load_config
from kvferry.membership import Role
from kvferry.rpc.v1 import inference_pb2 as inference
from tests.support.in_process_cluster import Answer, InProcessCluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.config import ClusterConfig
    from tests.support.prompts import Prompt

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 5},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
DATE = r"(19|20)[0-9]{2}-[01][0-9]"
GRAMMAR = 'start: word (", " word){1,2} "."\nword: "red" | "green" | "blue"'
DRAWN = {"temperature": 1.0, "seed": 2**63 + 5}
N = 2


def _config(**overrides: str) -> ClusterConfig:
    return load_config(None, {}, {"cache.audit": "true"} | overrides)


def _is_valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CHECKS: dict[str, tuple[str, Callable[[str], object]]] = {
    "json_schema": (json.dumps(SCHEMA), _is_valid),
    "regex": (DATE, lambda text: re.fullmatch(DATE, text)),
    "grammar": (GRAMMAR, lambda text: re.fullmatch(r"\w+(, \w+){1,2}\.", text)),
}


def _ask(cluster: InProcessCluster, prompt: Prompt) -> dict[str, list[Answer]]:
    """Drawn answers under every kind of constraint, and a greedy one."""
    answers = {
        kind: cluster.generate_samples(prompt.ids, N, 60, **{kind: text}, **DRAWN)
        for kind, (text, _) in CHECKS.items()
    }
    answers["json_schema"].append(cluster.generate(prompt.ids, 60, json_schema=json.dumps(SCHEMA)))
    cluster.wait_idle()
    return answers


def test_answers_are_of_their_language_and_the_same_wherever_computed(
    prompts: list[Prompt],
) -> None:
    prompt = next(prompt for prompt in prompts if prompt.name == "length-33")
    with InProcessCluster(_config(), (Role.PREFILL, Role.DECODE)) as cluster:
        told = _ask(cluster, prompt)
        assert cluster.counters()["sink_adopted"] == len(CHECKS) + 1
        _check_refusals(cluster, prompt)
    counts = {"workers.both.count": "1", "workers.prefill.count": "0", "workers.decode.count": "0"}
    with InProcessCluster(_config(**counts), (Role.BOTH,)) as cluster:
        aggregated = _ask(cluster, prompt)
    for kind, (_, check) in CHECKS.items():
        for answer in told[kind]:
            assert check(answer.text), answer
            assert answer.finish.reason == inference.FINISH_REASON_STOP
        assert [(one.token_ids, one.text) for one in told[kind]] == [
            (one.token_ids, one.text) for one in aggregated[kind]
        ]


def _check_refusals(cluster: InProcessCluster, prompt: Prompt) -> None:
    for kind, text in (("json_schema", '{"not": {}}'), ("regex", "("), ("grammar", "start: a")):
        with pytest.raises(grpc.RpcError) as refused:
            cluster.generate(prompt.ids, 8, **{kind: text})
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details().startswith(f"sampling.{kind}: ")
