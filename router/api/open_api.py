"""`/openapi.json`: the API described by the very types that read bodies and shape answers."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from router.api.openai_body import ChatBody, CompletionBody
from router.api.openai_requests import REQUEST_ID_HEADER, TIMEOUT_HEADER
from router.api.openai_shapes import (
    ChatBodyOut,
    ChatChunk,
    CompletionBodyOut,
    ErrorBody,
    ModelList,
    ModelOut,
    StatusOut,
)
from router.api.security import TENANT_HEADER

_REF = "#/components/schemas/{model}"
_SHAPES: tuple[Any, ...] = (
    *(ChatBodyOut, ChatChunk, CompletionBodyOut, ModelList, ModelOut, StatusOut, ErrorBody),
)

_PROBLEMS = {
    "400": "A field or header has a value that cannot be served; `error.param` names it.",
    "404": "No such model or path.",
    "408": "The body did not arrive in time.",
    "409": "A request of this id is running.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "429": "Too much is running or waiting; `Retry-After` says when to come again.",
    "499": "The request was cancelled by its id.",
    "500": "A fault of the server.",
    "503": "No worker can be reached; `Retry-After` says when to come again.",
    "504": "It was not done before its deadline.",
}
_EVENT = {
    "description": "Each event: the JSON of what is new, in the end `[DONE]`.",
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_HEADERS = (
    (REQUEST_ID_HEADER, "Part of the request's id", {"type": "string", "maxLength": 100}),
    (TENANT_HEADER, "On whose account; without API keys only", {"type": "string"}),
    (TIMEOUT_HEADER, "How long the caller waits, in seconds", {"type": "string"}),
)


@cache
def describe_api() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvferry", "version": version("kvferry")},
        "paths": {
            "/v1/chat/completions": {
                "post": _generation("Continue a conversation", "ChatBody", "ChatBodyOut"),
            },
            "/v1/completions": {
                "post": _generation("Continue a text", "CompletionBody", "CompletionBodyOut"),
            },
            "/v1/models": {"get": _get("What is served", "ModelList")},
            "/v1/models/{model}": {"get": _get_model()},
            "/health": {"get": _get("Whether the process lives", "StatusOut")},
            "/ready": {"get": _get("Whether requests can be served", "StatusOut", "503")},
            "/metrics": {"get": _metrics()},
        },
        "components": {"schemas": _schemas()},
    }


def _schemas() -> dict[str, Any]:
    bodies = [(ChatBody, "validation"), (CompletionBody, "validation")]
    _, top = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
    schemas: dict[str, Any] = dict(top["$defs"])
    for shape in _SHAPES:
        schema = TypeAdapter(shape).json_schema(ref_template=_REF, mode="serialization")
        schemas |= schema.pop("$defs", {})
        if "$ref" not in schema:
            schemas[shape.__name__] = schema
    return schemas


def _generation(summary: str, body: str, answer: str) -> dict[str, Any]:
    content = {
        **_json(answer),
        "text/event-stream": {"schema": _EVENT},
    }
    return {
        "summary": summary,
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
            for name, text, schema in _HEADERS
        ],
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {"200": {"description": "The answer", "content": content}, **_problems()},
    }


def _get(summary: str, answer: str, *problems: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "OK", "content": _json(answer)},
            **_problems(*problems, "404"),
        },
    }


def _get_model() -> dict[str, Any]:
    parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    return {**_get("One model", "ModelOut"), "parameters": [parameter]}


def _metrics() -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {
        "summary": "Figures in Prometheus' format",
        "responses": {"200": {"description": "OK", "content": text}},
    }


def _problems(*statuses: str) -> dict[str, Any]:
    return {
        status: {"description": _PROBLEMS[status], "content": _json("ErrorBody")}
        for status in statuses or _PROBLEMS
    }


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=name)}}}
