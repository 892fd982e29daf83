"""A small web server on this machine that lists the plans and shows each, live. It reads, and changes nothing.

Only names of this machine are answered to, so that no page of somebody else's can ask through a name of its own that
leads here (DNS rebinding). A page asks about every second; a plan is looked at once for all who ask, and rendered anew
only where it has changed.
"""

from __future__ import annotations

import hashlib
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from tsg import values
from tsg.cockpit import render, scene
from tsg.errors import InvalidInput, LedgerError, PlanNotFound
from tsg.ledger import Ledger
from tsg.plan.store import Plans

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["app", "serve"]

_HOST: Final = "127.0.0.1"
_OUR_NAMES: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})

#: How long what was seen of a plan is good for whoever asks next: so many times as long as looking took, in seconds.
_REST: Final = 4
_SHORTEST_REST: Final = 0.25
_LONGEST_REST: Final = 1.0
#: The most pages that are kept, so that they need not be rendered again.
_MOST_KEPT: Final = 32

#: Of each answer.
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


def app(plans: Plans | Ledger, *, theme: str = "pet") -> Starlette:
    """The server as an ASGI application, which is to be served on this machine only.

    Args:
        plans: may be on a read-only ledger.

    Raises:
        InvalidInput: neither plans nor a ledger, no such theme, or the extra ``cockpit`` is not installed.
        SchemaOutdated, SchemaTooNew, StateConflict: as :class:`tsg.Plans`.
    """
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.responses import PlainTextResponse, Response
        from starlette.routing import Route
    except ImportError:
        raise InvalidInput("a server needs an extra: pip install 'tsg-ledger[cockpit]'") from None
    pages = _Pages(plans if isinstance(plans, Plans) else Plans(plans), render.require_theme(theme))

    async def answer(request: Request, name: str | None) -> Response:
        try:
            # Looking waits for the database, and must not keep others waiting.
            found = await run_in_threadpool(pages.page_of, name)
        except LedgerError:
            return PlainTextResponse("the plans can't be read at the moment", 503)
        return said(request, found)

    def said(request: Request, found: _Page) -> Response:
        if found.tag in _tags(request):
            return Response(status_code=304, headers={"ETag": found.tag})
        return Response(found.content, found.status, {"ETag": found.tag}, "text/html; charset=utf-8")

    async def index(request: Request) -> Response:
        return await answer(request, None)

    async def plan(request: Request) -> Response:
        return await answer(request, request.path_params["name"])

    async def plan_by_query(request: Request) -> Response:
        return await answer(request, request.query_params.get("name", ""))

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return said(request, pages.missing)
        return PlainTextResponse(error.detail, error.status_code, error.headers)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/plans/", plan_by_query),
            Route("/plans/{name:path}", plan),
        ],
        middleware=[Middleware(_Guard)],
        exception_handlers={HTTPException: refuse},
    )


def serve(
    plans: Plans | Ledger,
    *,
    port: int,
    theme: str = "pet",
    announce: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve on 127.0.0.1 until SIGINT or SIGTERM.

    Args:
        port: 0 for any that is free.
        announce: called with the server's address, as soon as it can be asked.

    Raises:
        InvalidInput: as :func:`app`; no port, or one that somebody else has.
    """
    number = values.whole(port, "a port")
    if number > 65535:
        raise InvalidInput("a port is a number up to 65535")
    served = app(plans, theme=theme)
    try:
        import uvicorn
    except ImportError:
        raise InvalidInput("a server needs an extra: pip install 'tsg-ledger[cockpit]'") from None
    config = uvicorn.Config(
        served,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )
    with _listening(number) as listener, _stopping():
        announce(f"http://{_HOST}:{listener.getsockname()[1]}/")
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((_HOST, port))
            listener.listen(128)
        except OSError:
            raise InvalidInput("nothing can be served on this port; name another, or 0 for any that is free") from None
        yield listener


@contextmanager
def _stopping() -> Iterator[None]:
    """Let the signals by which uvicorn has stopped, and which it raises once more at its end, do no more than that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tags(request: Request) -> set[str]:
    return {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}


class _Page:
    """What is answered, with the time up to which it is so without another look."""

    def __init__(self, shown: Any, html: str, status: int = 200) -> None:
        self.shown = shown
        self.content = html.encode()
        self.status = status
        self.tag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'
        self.good_until = 0.0


class _Pages:
    """The pages as they were last seen, each asked for by the name of its plan; by ``None`` the list of all.

    Attributes:
        missing: what is answered where there is nothing.
    """

    def __init__(self, plans: Plans, theme: str) -> None:
        self._plans = plans
        self._theme = theme
        self._kept: OrderedDict[str | None, _Page] = OrderedDict()
        # One looks at a time: a hundred pages that ask at once cost no more than one, and no more than a connection.
        self._lock = threading.Lock()
        self.missing = _Page(None, render.missing(theme=theme), 404)

    def page_of(self, name: str | None) -> _Page:
        """A plan's page, at most as old as :data:`_LONGEST_REST`, or that which says that there is none."""
        with self._lock:
            kept = self._kept.get(name)
            if kept is not None and time.monotonic() < kept.good_until:
                return kept
            began = time.monotonic()
            try:
                found = self._looked(name, kept)
            except (PlanNotFound, InvalidInput):
                self._kept.pop(name, None)
                return self.missing
            rest = min(_LONGEST_REST, max(_SHORTEST_REST, _REST * (time.monotonic() - began)))
            found.good_until = time.monotonic() + rest
            self._kept[name] = found
            self._kept.move_to_end(name)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return found

    def _looked(self, name: str | None, kept: _Page | None) -> _Page:
        shown: Any = scene.overview(self._plans) if name is None else scene.look(self._plans, name)
        if kept is not None and kept.shown == shown:
            return kept
        if name is None:
            return _Page(shown, render.plans(shown, theme=self._theme))
        return _Page(shown, render.page(shown, theme=self._theme, live=True))


class _Guard:
    """Refuses whoever came by another name, and says with each answer what a browser may do with it."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner
        policy = f"{render.policy(live=True)}; frame-ancestors 'none'"
        self._headers = [*_HEADERS, (b"content-security-policy", policy.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        if scope["type"] == "http" and not _is_ours(scope):
            await send_guarded(
                {"type": "http.response.start", "status": 421, "headers": [(b"content-type", b"text/plain")]}
            )
            await send_guarded({"type": "http.response.body", "body": b"this server answers to localhost only"})
            return
        await self._inner(scope, receive, send_guarded)


def _is_ours(scope: Scope) -> bool:
    """Whether a request names this machine, at whatever port: it may have come through a tunnel."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].decode("latin-1").lower().rpartition(":")
    if not port.isdecimal() or not name:
        name = hosts[0].decode("latin-1").lower()
    return name in _OUR_NAMES
