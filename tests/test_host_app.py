"""The example service as a process of its own, on both databases: killed without notice, and put right again."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tsg import Ledger

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

#: The order that counts, and its tasks: the last one, and by their parents those before it.
ATTEMPTS = """
    WITH RECURSIVE attempts (order_id, id, parent_id, status, code) AS (
        SELECT orders.id, t.id, t.parent_id, t.status, t.terminal_code
        FROM orders JOIN tsg_tasks t ON t.id = orders.task_id
        UNION ALL
        SELECT attempts.order_id, t.id, t.parent_id, t.status, t.terminal_code
        FROM attempts JOIN tsg_tasks t ON t.id = attempts.parent_id
    )
    SELECT order_id, status, code FROM attempts
"""


class Host:
    """The service on one database."""

    def __init__(self, url: sa.URL, log: Path) -> None:
        self.url = url.render_as_string(hide_password=False)
        self.log = log
        self.engine = sa.create_engine(url)
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(timeout=10, trust_env=False)

    def start(self, **settings: float) -> None:
        """Start it, and wait until it serves."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.client.base_url = f"http://127.0.0.1:{port}"
        environment = {
            **os.environ,
            **{name.upper(): str(value) for name, value in settings.items()},
            "DATABASE_URL": self.url,
            "PORT": str(port),
            "PYTHONPATH": str(EXAMPLES),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "host_app"], stdout=log, stderr=log, env=environment
            )
        self.wait(self.serves)

    def serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        try:
            return bool(self.client.get("/orders").is_success)
        except httpx.TransportError:
            return False

    def stop(self, how: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        status = self.process.wait(timeout=30)
        self.process = None
        return status

    def wait(self, until: Callable[[], bool], seconds: float = 60) -> None:
        give_up = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < give_up, self.log.read_text()
            time.sleep(0.02)

    def order(self, item: str, quantity: int) -> Any:
        answer = self.client.post("/orders", json={"item": item, "quantity": quantity})
        assert answer.status_code == 201
        return answer.json()

    def orders(self) -> list[Any]:
        return list(self.client.get("/orders").json())

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(statement))]

    def attempts(self) -> dict[int, list[tuple[str, str | None]]]:
        """The state and reason of each task of each order, the last one first."""
        found: dict[int, list[tuple[str, str | None]]] = {}
        for order, status, code in self.query(ATTEMPTS):
            found.setdefault(order, []).append((status, code))
        return found

    def require_agreement(self) -> None:
        """Whatever was cut short: an order is done where its last task succeeded, and no task is without order."""
        states = dict(self.query("SELECT id, state FROM orders"))
        attempts = self.attempts()
        assert attempts.keys() == states.keys()
        assert sum(map(len, attempts.values())) == self.query("SELECT count(*) FROM tsg_tasks")[0][0]
        for order, tasks in attempts.items():
            assert (states[order] == "done") == (tasks[0][0] == "succeeded")
            assert not {"succeeded", "queued", "running"} & {status for status, _ in tasks[1:]}
        assert Ledger(self.engine).doctor()["healthy"]


@contextmanager
def hosted(url: sa.URL, log: Path) -> Iterator[Host]:
    host = Host(url, log)
    try:
        yield host
    finally:
        host.client.close()
        if host.process is not None:
            host.stop(signal.SIGKILL)
        host.engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    """The service, not started yet, on a database with nothing in it."""
    if request.param == "sqlite":
        url = sa.URL.create("sqlite", database=str(request.getfixturevalue("path")))
    else:
        url = request.getfixturevalue("empty_postgresql_url")
    with hosted(url, tmp_path / "log") as host:
        yield host


def test_killed_in_the_middle_of_an_order_it_is_reconciled_and_the_order_done_by_a_new_task(host: Host) -> None:
    host.start(step_seconds=0.1, active_grace_seconds=60, workers=1)
    long, waiting = host.order("tea", 500), host.order("milk", 2)
    host.wait(lambda: host.orders()[0]["packed"] >= 2)
    assert host.client.get(f"/orders/{long['id']}/result").status_code == 409
    assert host.stop(signal.SIGKILL) == -signal.SIGKILL

    host.require_agreement()
    assert host.attempts() == {long["id"]: [("running", None)], waiting["id"]: [("queued", None)]}
    # So that the retry is not a long one.
    with host.engine.begin() as connection:
        ((packed,),) = connection.execute(sa.text("SELECT packed FROM orders WHERE id = 1")).all()
        connection.execute(sa.text("UPDATE orders SET quantity = packed + 2 WHERE id = 1"))

    time.sleep(2)
    host.start(step_seconds=0.01, active_grace_seconds=2)
    # By the time that it serves, what the killed process left behind is closed and put back.
    assert host.attempts()[long["id"]][1] == ("timed_out", "restart_stale")
    host.wait(lambda: all(order["state"] == "done" for order in host.orders()))
    host.require_agreement()
    first, second = host.orders()
    assert (first["packed"], first["attempts"], first["task_code"]) == (packed + 2, 2, "worker_completed")
    assert (second["packed"], second["attempts"]) == (2, 1)
    assert first["task"] != long["task"]
    assert second["task"] == waiting["task"]

    # A result that was sent may be asked for again; a delivery that was acknowledged is closed.
    result = f"/orders/{long['id']}/result"
    assert host.client.get(result).json() == {"result": f"{packed + 2} x tea"}
    assert host.orders()[0]["delivery_status"] == "pending"
    for _ in range(2):
        assert host.client.post(f"{result}/received").json()["delivery_status"] == "delivered"
    health = host.client.get("/health")
    assert (health.status_code, health.json()["healthy"]) == (200, True)
    assert health.json()["task_status_counts"]["timed_out"] == 1
    host.stop(signal.SIGTERM)


def test_killed_six_times_at_random_every_order_is_done_once(host: Host) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    placed: dict[int, int] = {}
    settings = {"step_seconds": 0.03, "active_grace_seconds": 0.6}
    for _ in range(6):
        host.start(**settings)
        for _ in range(2):
            order = host.order("tea", chance.randint(3, 15))
            placed[order["id"]] = order["quantity"]
        time.sleep(chance.uniform(0, 0.5))
        host.stop(signal.SIGKILL)
        host.require_agreement()
    host.start(**settings)
    host.wait(lambda: all(order["state"] == "done" for order in host.orders()))
    host.require_agreement()
    assert {order["id"]: order["packed"] for order in host.orders()} == placed
    for tasks in host.attempts().values():
        assert [status for status, _ in tasks].count("succeeded") == 1, f"seed {seed}"
        assert set(tasks[1:]) <= {("timed_out", "restart_stale")}, f"seed {seed}"
    host.stop(signal.SIGTERM)


def test_a_rejected_order_leaves_neither_row_and_a_stop_leaves_nothing_running(host: Host) -> None:
    host.start(step_seconds=0.2)
    for asked in (
        {"item": "tea", "quantity": 0},
        {"item": "tea", "quantity": 10**30},
        {"item": "\0", "quantity": 1},
        [],
        None,
    ):
        assert host.client.post("/orders", json=asked).status_code == 422
    assert host.client.post("/orders", content=rb'{"item": "\ud800", "quantity": 1}').status_code == 422
    assert host.client.post("/orders", content=b"\xff").status_code == 422
    assert host.client.get("/orders/1").status_code == 404
    assert host.client.post("/orders/1/result/received").status_code == 404
    assert host.query("SELECT (SELECT count(*) FROM orders) + (SELECT count(*) FROM tsg_tasks)") == [(0,)]

    order = host.order("tea", 900)
    assert host.client.post(f"/orders/{order['id']}/result/received").status_code == 409
    host.wait(lambda: host.orders()[0]["packed"] > 0)
    # uvicorn ends as it was told to, once the service is shut down.
    assert host.stop(signal.SIGTERM) in (0, -signal.SIGTERM)
    host.require_agreement()
    assert host.attempts() == {order["id"]: [("queued", None), ("cancelled", "caller_cancelled")]}

    ran = subprocess.run(
        [sys.executable, "-m", "alembic", "-c", str(EXAMPLES / "host_app" / "alembic.ini"), "check"],
        env={**os.environ, "DATABASE_URL": host.url},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (0, "No new upgrade operations detected.\n"), ran.stderr
