"""The server, in a process of its own, asked as a browser asks it: beside writers, on either database."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from typing import NamedTuple

import pytest
import sqlalchemy as sa

from tests.cockpit.serving import Server, serving
from tests.conftest import tsg
from tsg import InvalidInput, Ledger, Plans
from tsg.cockpit import render
from tsg.cockpit.scene import look
from tsg.cockpit.server import app, serve

#: How long a change may take to be seen.
SECONDS = 3.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


def ask(server: Server, path: str = "/", *, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=given)
        answer = connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode())
    finally:
        connection.close()


def until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "too late"
        time.sleep(0.05)


NAMES = (
    "plain",
    "two words",
    "a/b",
    "/",
    "a//b/",
    "a?b#c",
    "..",
    ".",
    "a/../b",
    "..%2F..",
    "%2e%2e",
    "100 %",
    "计划-é",
    "<script>&\"'",
    "plans/",
    "a+b;c=d&e",
)


def test_plans_are_listed_and_each_link_leads_to_its_own_whatever_its_name(served: tuple[Plans, Server]) -> None:
    plans, server = served
    for name in NAMES:
        plans.create(name, description=f"this is {name}")
    until(lambda: render.address(NAMES[-1]) in unescape(ask(server).text))
    links = [unescape(link) for link in re.findall(r'<a href="([^"]+)" data-plan', ask(server).text)][: len(NAMES)]
    for link, name in zip(links, reversed(NAMES), strict=True):
        answer = ask(server, link)
        assert answer.status == 200
        assert render.page(look(plans, name), live=True) == answer.text


def test_a_plan_that_is_not_there_is_a_page_of_its_own_until_it_is(served: tuple[Plans, Server]) -> None:
    plans, server = served
    for path in ("/plans/nothing", "/plans/a%0Ab", "/plans/", "/plans/?name=x", f"/plans/{'x' * 300}", "/plans/%ff"):
        answer = ask(server, path)
        assert (answer.status, "No such plan" in answer.text) == (404, True)
    plans.create("nothing")
    until(lambda: ask(server, "/plans/nothing").status == 200)


def test_what_changes_is_seen_in_time_and_what_does_not_costs_no_page(feature: Plans, server: Server) -> None:
    first = ask(server, "/plans/feature")
    tag = first.headers["etag"]
    same = ask(server, "/plans/feature", If_None_Match=tag)
    assert (same.status, same.text, same.headers["etag"]) == (304, "", tag)
    assert ask(server, "/plans/feature", If_None_Match=f'"other", W/{tag}').status == 304
    feature.start("feature", "T-001")
    until(lambda: ask(server, "/plans/feature", If_None_Match=tag).status == 200)
    assert "1 agent at work" in ask(server, "/plans/feature").text
    feature.remove("feature")
    until(lambda: ask(server, "/plans/feature", If_None_Match=tag).status == 404)


def test_the_list_changes_too(served: tuple[Plans, Server]) -> None:
    plans, server = served
    assert "/plans/newest" not in ask(server).text
    plans.create("newest")
    until(lambda: "/plans/newest" in ask(server).text)
    plans.remove("newest")
    until(lambda: "/plans/newest" not in ask(server).text)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/plans/feature", "/plans/?name=feature"])
def test_nothing_can_be_done_but_look(one_server: Server, method: str, path: str) -> None:
    answer = ask(one_server, path, method=method)
    assert answer.status == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_head_tells_the_same_without_the_page(one_server: Server) -> None:
    whole, head = ask(one_server, "/plans/feature"), ask(one_server, "/plans/feature", method="HEAD")
    assert (head.status, head.text, head.headers["etag"]) == (200, "", whole.headers["etag"])


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::2]", "0.0.0.0", "127.0.0.2", "a@b"],
)
def test_whoever_comes_by_another_name_is_refused(one_server: Server, host: str) -> None:
    for named in (host, f"{host}:{one_server.port}"):
        answer = ask(one_server, "/plans/feature", Host=named)
        assert answer.status in (400, 421)
        assert "first" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_names_of_this_machine_are_answered_to_at_any_port(one_server: Server, host: str) -> None:
    for named in (host, f"{host}:{one_server.port}", f"{host}:1"):
        assert ask(one_server, "/plans/feature", Host=named).status == 200


@pytest.mark.parametrize("path", ["/", "/plans/feature", "/plans/nothing", "/nothing", "/favicon.ico"])
def test_each_answer_says_what_a_browser_may_do_with_it(one_server: Server, path: str) -> None:
    headers = ask(one_server, path).headers
    policy = headers["content-security-policy"]
    assert policy == f"{render.policy(live=True)}; frame-ancestors 'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers
    assert "access-control-allow-origin" not in headers


def test_many_who_ask_at_once_beside_a_writer_are_all_answered(feature: Plans, server: Server) -> None:
    def look_often(_: int) -> list[int]:
        return [ask(server, path).status for path in ("/", "/plans/feature", "/plans/nothing") for _ in range(4)]

    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(look_often, number) for number in range(12)]
        for number in range(40):
            feature.add_step("feature", subject=f"step {number}")
        found = [status for future in asked for status in future.result()]
    assert (found.count(200), found.count(404)) == (96, 48)
    until(lambda: "43 steps" in ask(server, "/plans/feature").text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_well_when_it_is_told_to_and_its_port_is_free_again(path: Path, number: signal.Signals) -> None:
    with Ledger(path) as ledger:
        Plans(ledger)
        with serving(path) as server:
            port = server.port
            assert ask(server).status == 200
            server.process.send_signal(number)
            assert server.process.wait(timeout=20) == 0
        with serving(path, port=port) as server:
            assert server.port == port
            assert ask(server).status == 200


def test_a_port_that_somebody_has_is_refused(path: Path, one_server: Server) -> None:
    with Ledger(path) as ledger, pytest.raises(InvalidInput, match="another"):
        serve(ledger, port=one_server.port)


def test_it_listens_on_this_machine_only(one_server: Server) -> None:
    if sys.platform != "linux":
        pytest.skip("reads Linux's /proc")
    hexed = f"{one_server.port:04X}"
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    local = {line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{hexed}")}
    assert local == {f"0100007F:{hexed}"}


@pytest.mark.parametrize("port", [-1, 65_536, "80", 1.5, None, True])
def test_what_is_no_port_is_refused(path: Path, port: object) -> None:
    with Ledger(path) as ledger, pytest.raises(InvalidInput):
        serve(ledger, port=port)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call", [lambda ledger: app(ledger, theme="neon"), lambda ledger: app(None), lambda ledger: app("ledger.sqlite")]
)
def test_what_can_not_be_served_is_refused(path: Path, call: Callable[[Ledger], object]) -> None:
    with Ledger(path) as ledger, pytest.raises(InvalidInput):
        call(ledger)


def test_the_command_serves_what_changes_after_it_was_started(place: Path | sa.URL, ledger: Ledger) -> None:
    plans = Plans(ledger)
    plans.create("feature")
    named = place.render_as_string(hide_password=False) if isinstance(place, sa.URL) else str(place)
    if not isinstance(place, sa.URL):
        ledger.close()
    command = [sys.executable, "-m", "tsg", "--db", named, "cockpit", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            server = Server(json.loads(process.stdout.readline())["url"], process)
            assert "no steps yet" in ask(server, "/plans/feature").text
            assert tsg("--db", named, "step", "add", "feature", "--subject", "a new one").returncode == 0
            until(lambda: "a new one" in ask(server, "/plans/feature").text)
            process.terminate()
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
