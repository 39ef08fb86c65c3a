"""What a server that is measured says of itself, before any load is on it."""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bench.plan import Door
from cluster.client import CallFailed
from kvferry.router_config import API_KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.plan import EndpointPlan
    from cluster.client import Client

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    """Of the record, and for the clients."""

    endpoint: EndpointPlan
    """With the model and the vocabulary that it tells."""
    context_length: int
    """0: it does not tell."""
    config: dict[str, Any]


def server_of(endpoint: EndpointPlan, connect: Callable[[], Client]) -> Server:
    """Asks it; `connect` is for routers. Raises `CallFailed`."""
    if endpoint.door is Door.HTTP:
        return _over_http(endpoint)
    with connect() as client:
        model, status = client.model_info(), client.cluster_status()
    config = {
        "model": model.model,
        "dtype": model.dtype,
        "page_size": model.page_size,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "routers": list(endpoint.addresses),
        "workers": [
            {"worker_id": worker.worker_id, "role": worker.role} for worker in status.workers
        ],
    }
    told = replace(endpoint, vocab_size=endpoint.vocab_size or model.vocab_size)
    return Server(told, model.context_length, config)


def _over_http(endpoint: EndpointPlan) -> Server:
    # Imported here: an HTTP client takes a while to load, which other commands need not wait for.
    from bench.http_endpoint import ssl_of

    url = f"{endpoint.addresses[0].rstrip('/')}/models"
    if not url.startswith(("http://", "https://")):
        raise CallFailed(f"http: {url} is no URL")
    key = os.environ.get(API_KEY_VARIABLE, "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(
            request, timeout=_TIMEOUT_S, context=ssl_of(endpoint)
        ) as response:
            (first, *_) = json.load(response)["data"]
    except (OSError, ValueError, KeyError) as error:
        raise CallFailed(f"{url} tells no models: {error}") from error
    context = first.get("max_model_len") or 0
    model = endpoint.model or str(first["id"])
    config = {
        "model": model,
        "context_length": context,
        "servers": list(endpoint.addresses),
    }
    return Server(replace(endpoint, model=model), context, config)
