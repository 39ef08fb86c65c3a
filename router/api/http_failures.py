"""The outermost frame of every HTTP handler: whatever it raises becomes an answer."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from aiohttp import web

from kvferry.errors import InternalError, KvferryError
from kvferry.rpc_errors import is_task_cancelled
from router.api.http_errors import (
    NO_NAMES,
    FieldNames,
    HttpRefusal,
    error_body,
    error_headers,
    error_status,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)


class CallFailed(Exception):
    """A call that ends in an error, and the names that its client has for the router's fields."""

    def __init__(self, error: KvferryError, names: FieldNames) -> None:
        super().__init__(str(error))
        self.error = error
        self.names = names


def server_fault(what: str) -> InternalError:
    """To be called where an exception is handled that is a fault of ours: its trace is logged."""
    _log.exception("%s for a fault of ours", what)
    return InternalError("a fault of the server; its log has the details")


@web.middleware
async def answer_failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in OpenAI's form."""
    try:
        return await handler(request)
    except CallFailed as failure:
        return error_response(failure.error, failure.names)
    except (KvferryError, HttpRefusal) as error:
        return error_response(error)
    except web.HTTPException as error:
        return library_refusal(request, error)
    except ConnectionError:
        raise  # The client is gone, and nobody reads an answer.
    except asyncio.CancelledError:
        if is_task_cancelled():
            raise  # The client is gone.
        return error_response(server_fault("a call was ended by a cancellation not its own"))
    except Exception:  # noqa: BLE001 - the handler's outermost frame; ends the call
        return error_response(server_fault("a call failed"))


def error_response(error: KvferryError | HttpRefusal, names: FieldNames = NO_NAMES) -> web.Response:
    """The whole answer."""
    return web.json_response(
        error_body(error, names), status=error_status(error), headers=error_headers(error)
    )


def library_refusal(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """What the library itself refuses: paths, methods and expectations that are not served."""
    path = request.rel_url.raw_path[:128]
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted({*error.allowed_methods, "OPTIONS"}))
        if request.method == "OPTIONS":
            return web.Response(status=204, headers={"Allow": allowed})
        message = f"{path}: {request.method[:32]} is not served here, but {allowed}"
        return error_response(HttpRefusal(405, "method_not_allowed", message, {"Allow": allowed}))
    if isinstance(error, web.HTTPNotFound):
        return error_response(HttpRefusal(404, "not_found", f"{path}: there is no such path"))
    if isinstance(error, web.HTTPExpectationFailed):
        problem = "expect: nothing is known but 100-continue"
        return error_response(HttpRefusal(417, "expectation_failed", problem))
    return error_response(HttpRefusal(error.status, "http_error", error.reason))
