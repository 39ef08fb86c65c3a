"""The files of the page, as they are in this package. They hold nothing of the cluster."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from router.api.http_errors import HttpRefusal

if TYPE_CHECKING:
    from collections.abc import Mapping

_DIRECTORY = Path(__file__).parent / "static"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Nothing becomes markup or code but what is in the files.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

GUARDS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of everything below `/console`: what is shown came from clients, who may be anybody."""


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    content_type: str
    tag: str
    """Changes with the body."""


class ConsolePage:
    """All files, read once: some 100 KB."""

    def __init__(self) -> None:
        self._files = {
            path.relative_to(_DIRECTORY).as_posix(): _read(path)
            for path in sorted(_DIRECTORY.rglob("*"))
            if path.suffix in _TYPES
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Of the files, relative to `/console/`."""
        return tuple(self._files)

    def answer(self, request: web.Request) -> web.Response:
        """The file that the path names. Raises `HttpRefusal` where there is none."""
        file = self._files.get(request.match_info.get("file") or _INDEX)
        if file is None:
            path = request.rel_url.raw_path[:128]
            raise HttpRefusal(404, "not_found", f"{path}: there is no such path")
        headers = {**GUARDS, "ETag": file.tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == file.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, headers=headers | {"Content-Type": file.content_type})


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:24]}"')
