"""The agents' file: who can be asked by which command, and how a command's places are filled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tsg import DamagedFile, InvalidInput
from tsg.runner.agents import DEFAULT_COMMAND_SECONDS, PLACEHOLDERS, Agent, Agents, filled

ONE = {"agent_id": "a"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "agents.json"


def test_the_source_s_own_file_names_agents_that_have_only_their_inbox(file: Path) -> None:
    file.write_text('{"agents": [{"agent_id": "bibi", "agent_name": "笔笔"}, {"agent_id": "tutu"}]}')
    agents = Agents.read(file)
    assert agents.of("bibi") == Agent("bibi", "笔笔", None, DEFAULT_COMMAND_SECONDS)
    assert agents.of("tutu") == Agent("tutu", "tutu")
    assert agents.of("nobody") == Agent("nobody", "nobody")
    assert DEFAULT_COMMAND_SECONDS == 60


def test_what_is_empty_is_as_good_as_left_out_and_what_is_unknown_is_let_be(file: Path) -> None:
    empty = {"agent_id": "a", "agent_name": "", "command": None, "timeout_seconds": None, "colour": {"of": "fur"}}
    file.write_text(json.dumps({"agents": [empty], "version": 7}))
    assert Agents.read(file).of("a") == Agent("a", "a")


def test_an_agent_may_have_a_command_and_a_time_limit(file: Path) -> None:
    command = ["prog", *(f"{{{name}}}" for name in PLACEHOLDERS)]
    file.write_text(json.dumps({"agents": [{"agent_id": "a", "command": command, "timeout_seconds": 1.5}]}))
    assert Agents.read(str(file)).of("a") == Agent("a", "a", tuple(command), 1.5)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "agents",
        "[]",
        "null",
        '{"agents": [}',
        "{}",
        '{"agents": {}}',
        '{"agents": null}',
        '{"agents": ["a"]}',
        '{"agents": [], "agents": []}',
        '{"agents": [{"agent_id": "a", "agent_id": "b"}]}',
        '{"agents": [{"agent_id": "a", "timeout_seconds": NaN}]}',
        '{"agents": [{"agent_id": "a", "timeout_seconds": 1e999}]}',
        "[" * 200 + "]" * 200,
        '{"agents": ' + "[" * 150 + "]" * 150 + "}",
        b"\xff\xfe{}",
        b'{"agents": [{"agent_id": "\xff"}]}',
    ],
)
def test_a_file_that_is_not_of_the_form_is_said_to_be_the_agents(file: Path, content: str | bytes) -> None:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DamagedFile) as raised:
        Agents.read(file)
    assert raised.value.file == "agents"


@pytest.mark.parametrize(
    "agent",
    [
        {},
        {"agent_id": ""},
        {"agent_id": None},
        {"agent_id": 7},
        {"agent_id": " a"},
        {"agent_id": "a\nb"},
        {"agent_id": "x" * 201},
        {"agent_id": "\ud800"},
        {"agent_name": "no id"},
        {**ONE, "agent_name": 7},
        {**ONE, "agent_name": "two\nlines"},
        {**ONE, "command": "prog {message}"},
        {**ONE, "command": []},
        {**ONE, "command": [""]},
        {**ONE, "command": ["prog", 7]},
        {**ONE, "command": ["prog", None]},
        {**ONE, "command": {"prog": "x"}},
        {**ONE, "command": ["pr\0og"]},
        {**ONE, "command": ["prog", "\ud800"]},
        {**ONE, "command": ["prog", "{mesage}"]},
        {**ONE, "command": ["prog", "--x={step}{what}"]},
        {**ONE, "timeout_seconds": 0},
        {**ONE, "timeout_seconds": -1},
        {**ONE, "timeout_seconds": "soon"},
        {**ONE, "timeout_seconds": True},
        {**ONE, "timeout_seconds": [1]},
    ],
)
def test_an_agent_that_is_not_of_the_form_is_damage_of_the_agents_file(file: Path, agent: dict[str, Any]) -> None:
    file.write_text(json.dumps({"agents": [{"agent_id": "sound"}, agent]}))
    with pytest.raises(DamagedFile) as raised:
        Agents.read(file)
    assert raised.value.file == "agents"


def test_an_agent_that_is_there_twice_is_damage(file: Path) -> None:
    file.write_text(json.dumps({"agents": [ONE, {"agent_id": "b"}, ONE]}))
    with pytest.raises(DamagedFile, match="twice"):
        Agents.read(file)


@pytest.mark.skipif(os.name != "posix", reason="files are opened as POSIX does")
def test_what_is_no_file_is_said_to_be_the_agents(file: Path) -> None:
    for place in (file, file.parent, file / "below", Path("/dev/zero")):
        with pytest.raises(DamagedFile) as raised:
            Agents.read(place)
        assert raised.value.file == "agents"


def test_a_link_and_a_pipe_are_read_too(file: Path) -> None:
    """A shell's ``<(…)`` is one."""
    file.write_text(json.dumps({"agents": [ONE]}))
    link = file.with_name("link")
    link.symlink_to(file)
    assert Agents.read(link).of("a") == Agent("a", "a")
    reader, writer = os.pipe()
    os.write(writer, file.read_bytes())
    os.close(writer)
    assert Agents.read(f"/dev/fd/{reader}").of("a") == Agent("a", "a")
    os.close(reader)


@pytest.mark.parametrize("path", ["", "a\0b", None, 7])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(InvalidInput):
        Agents.read(path)


# -- places ------------------------------------------------------------------------------------------------

SAID = {name: f"<{name}>" for name in PLACEHOLDERS}


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("{agent}", "<agent>"),
        ("--to={agent}/{session}", "--to=<agent>/<session>"),
        ("{step}{step}", "<step><step>"),
        ("{{step}}", "{<step>}"),
        ('{"step": "{step}"}', '{"step": "<step>"}'),
        ("{}", "{}"),
        ("{0}", "{0}"),
        ("{Step}", "{Step}"),
        ("{step!r} {step:>9}", "{step!r} {step:>9}"),
        ("%s $STEP ${step}", "%s $STEP $<step>"),
        ("", ""),
    ],
)
def test_a_place_is_filled_wherever_it_stands_and_nothing_else_is_touched(argument: str, expected: str) -> None:
    assert filled(["prog", argument, "last"], SAID) == ["prog", expected, "last"]


def test_what_is_put_in_is_not_looked_at_again(tmp_path: Path) -> None:
    said = {**SAID, "params": '{"text":"{message} {attempt}"}', "message": "{params} {agent}"}
    assert filled(["{params}", "{message}", "{message}{params}"], said) == [
        said["params"],
        said["message"],
        said["message"] + said["params"],
    ]


@pytest.mark.parametrize(
    "value", ["two words", "", "a\nb", "'\"\\", "$(touch x) `id` ; | & > < * ? ~ !", "-rf", "笔笔"]
)
def test_each_value_stays_one_argument(value: str) -> None:
    assert filled(["prog", "{plan}", "x{plan}y"], {**SAID, "plan": value}) == ["prog", value, f"x{value}y"]
