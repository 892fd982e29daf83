"""The service over HTTP. Each request is one transaction; errors become answers at one door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.orm.exc import StaleDataError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import tsg
from host_app import service
from host_app.config import Config
from host_app.db import Database
from host_app.worker import Worker

_Answer = TypeVar("_Answer")


def create_app(config: Config) -> Starlette:
    """The application. When it starts it migrates its database, recovers what was left behind, and works."""
    database = Database(config.database_url)
    worker = Worker(database, config)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await asyncio.to_thread(database.migrate)
        await asyncio.to_thread(worker.start)
        yield
        await asyncio.to_thread(worker.stop)
        database.close()

    app = Starlette(
        routes=[
            Route("/orders", place, methods=["POST"]),
            Route("/orders", list_orders),
            Route("/orders/{id:int}", show),
            Route("/orders/{id:int}/result", result),
            Route("/orders/{id:int}/result/received", received, methods=["POST"]),
            Route("/health", health),
        ],
        exception_handlers={
            service.NoSuchOrder: _answer(404),
            service.Rejected: _answer(422),
            tsg.StateConflict: _answer(409),
            StaleDataError: _answer(409),
        },
        lifespan=lifespan,
    )
    app.state.database = database
    app.state.config = config
    return app


async def place(request: Request) -> Response:
    try:
        asked = await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        asked = None
    if not isinstance(asked, dict):
        raise service.Rejected("an order is a JSON object")
    timeout = request.app.state.config.timeout_seconds

    def work(session: Session) -> service.View:
        order = service.place(session, asked.get("item"), asked.get("quantity"), timeout_seconds=timeout)
        return service.view(order)

    return JSONResponse(await _inside(request, work), 201)


async def list_orders(request: Request) -> Response:
    return JSONResponse(await _inside(request, lambda session: [service.view(o) for o in service.orders(session)]))


async def show(request: Request) -> Response:
    number = request.path_params["id"]
    return JSONResponse(await _inside(request, lambda session: service.view(service.find(session, number))))


async def result(request: Request) -> Response:
    """The result, once there is one. That it was sent is no proof that it arrived: the customer says so."""
    order = await _inside(request, lambda session: service.view(service.find(session, request.path_params["id"])))
    if order["state"] != "done":
        return JSONResponse({"error": "not done yet"}, 409)
    return JSONResponse({"result": f"{order['quantity']} x {order['item']}"})


async def received(request: Request) -> Response:
    number = request.path_params["id"]
    return JSONResponse(await _inside(request, lambda session: service.view(service.receive(session, number))))


async def health(request: Request) -> Response:
    """Doctor's report on the ledger; 503 where it is not healthy."""
    report = await _inside(request, tsg.doctor.examine, request.app.state.database.exact)
    return JSONResponse(report, 200 if report["healthy"] else 503)


async def _inside(
    request: Request, work: Callable[[Session], _Answer], sessions: sessionmaker[Session] | None = None
) -> _Answer:
    """Do `work` in one transaction, on a thread."""
    begin = (sessions or request.app.state.database.sessions).begin

    def run() -> _Answer:
        with begin() as session:
            return work(session)

    return await asyncio.to_thread(run)


def _answer(status: int) -> Callable[[Request, Exception], Response]:
    def handle(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": type(error).__name__}, status)

    return handle
