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
CHECKS: list[Any] = [
    *(not_a_server_error, status_code_conformance),
    *(content_type_conformance, response_schema_conformance),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterBench]:
    directory = write_model(tmp_path_factory.mktemp("model"))
    with served_router(directory, FakeWorker("w"), requests_max=256) as served:
        yield served


def ask(bench: RouterBench, label: str, mode: GenerationMode, examples: int) -> None:
    with requests.Session() as session:

        @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        def keeps_to_the_description(case: Case) -> None:
            response = case.call(base_url=bench.http_url, session=session, timeout=20)
            case.validate_response(response, checks=CHECKS)
            if response.status_code >= 400:
                names_its_field(response.json()["error"])

        keeps_to_the_description()


def names_its_field(error: dict[str, Any]) -> None:
    """By `param`, or with the message's first word."""
    field, _, problem = error["message"].partition(":")
    assert problem.strip(), error
    assert field == (error["param"] or field)
    assert " " not in field.split("(")[0].strip(), error


@pytest.mark.parametrize("label", OPERATIONS)
def test_a_sample(bench: RouterBench, label: str) -> None:
    ask(bench, label, GenerationMode.POSITIVE, 6)
    if label.startswith("POST"):
        ask(bench, label, GenerationMode.NEGATIVE, 10)


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label in OPERATIONS if label.startswith("POST")])
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_many(bench: RouterBench, label: str, mode: GenerationMode) -> None:
    ask(bench, label, mode, 1000)
