"""The HTTP API keeps to its own description, whatever a client sends (schemathesis)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode, openapi
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from router.api.open_api import describe_api
from tests.support.fake_worker import FakeWorker
from tests.support.fuzz_target import FILES_GROWN_MAX, FuzzTarget, fuzz_target, open_files
from tests.support.router_model import write_model
from tests.support.served_router import served_router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.router_bench import RouterBench

OPERATIONS = {
    operation.label: operation
    for operation in (
        result.ok() for result in openapi.from_dict(describe_api()).get_all_operations()
    )
}
MANY = [
    (label, mode)
    for label in OPERATIONS
    for mode in GenerationMode
    # There is nothing to vary in a path without a parameter, and no text is wrong as one.
    if label.startswith("POST") or ("{" in label and mode is GenerationMode.POSITIVE)
]
CHECKS: list[Any] = [
    *(not_a_server_error, status_code_conformance),
    *(content_type_conformance, response_schema_conformance),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterBench]:
    directory = write_model(tmp_path_factory.mktemp("model"))
    with served_router(directory, FakeWorker("w"), requests_max=256) as served:
        yield served


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzTarget]:
    with fuzz_target(tmp_path_factory.mktemp("model")) as running:
        yield running


def ask(url: str, label: str, mode: GenerationMode, examples: int) -> None:
    with requests.Session() as session:

        @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        def keeps_to_the_description(case: Case) -> None:
            response = case.call(base_url=url, session=session, timeout=60)
            case.validate_response(response, checks=CHECKS)
            if response.status_code >= 400:
                names_its_field(response.json()["error"])

        keeps_to_the_description()


def names_its_field(error: dict[str, Any]) -> None:
    """By `param`, or with the message's first word."""
    message, param = error["message"], error["param"]
    if param is None:
        field, _, problem = message.partition(":")
        assert " " not in field.split("(")[0].strip(), error
    else:
        # Keys below a field are the client's own, with spaces and colons in them.
        assert message.startswith(f"{param}: "), error
        assert " " not in param.partition(".")[0], error
        problem = message.removeprefix(f"{param}: ")
    assert problem.strip(), error


@pytest.mark.parametrize("label", OPERATIONS)
def test_a_sample(bench: RouterBench, label: str) -> None:
    ask(bench.http_url, label, GenerationMode.POSITIVE, 6)
    if label.startswith("POST"):
        ask(bench.http_url, label, GenerationMode.NEGATIVE, 10)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_a_stream_keeps_to_the_description(
    bench: RouterBench, path: str, body: dict[str, Any]
) -> None:
    operation = OPERATIONS[f"POST {path}"]
    case = operation.Case(body=body | {"stream": True}, media_type="application/json")
    with requests.Session() as session:
        response = case.call(base_url=bench.http_url, session=session, timeout=60)
    assert response.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(response, checks=CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize(("label", "mode"), MANY)
def test_many_leave_workers_as_they_were(
    target: FuzzTarget, label: str, mode: GenerationMode
) -> None:
    ask(target.http_url, label, mode, 20)
    files = open_files()
    ask(target.http_url, label, mode, 1000)
    target.assert_nothing_left()
    assert open_files() < files + FILES_GROWN_MAX
