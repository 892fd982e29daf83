"""Who can be asked to do a step, and by which command: the agents' file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from tsg import values
from tsg.errors import DamagedFile, InvalidInput
from tsg.plan import disk, fields

__all__ = ["DEFAULT_COMMAND_SECONDS", "PLACEHOLDERS", "Agent", "Agents", "filled"]

#: How long a command may take to hand a step over, where its agent says nothing else.
DEFAULT_COMMAND_SECONDS: Final = 60.0
#: What may stand in an argument of a command, each in braces.
PLACEHOLDERS: Final = ("agent", "agent_name", "session", "plan", "step", "attempt", "message", "params")

_PLACE: Final = re.compile(r"\{([a-z_]+)\}")


class Agent(NamedTuple):
    """One agent.

    Attributes:
        id: by which steps name it.
        name: for people.
        command: what hands a step over to it, as arguments; ``None`` where it only has its inbox.
        timeout_seconds: how long that may take.
    """

    id: str
    name: str
    command: tuple[str, ...] | None = None
    timeout_seconds: float = DEFAULT_COMMAND_SECONDS


class Agents:
    """The agents of a file, ``{"agents": [{"agent_id": …, "agent_name": …, "command": […], "timeout_seconds": …}]}``.

    One that is not in it has its inbox alone. Other fields are let be.
    """

    def __init__(self, known: Sequence[Agent] = ()) -> None:
        self._known = {agent.id: agent for agent in known}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Agents:
        """The agents of a file.

        Raises:
            InvalidInput: no path.
            DamagedFile: it is not there, or not of that form.
        """
        place = disk.path_from(path)
        # Not its name, which may say anything. It may be a link, or what a shell has made of a command's output.
        name = "agents"
        try:
            with open(place, "rb") as file:
                content = file.read(disk.LARGEST + 1)
        except OSError:
            raise DamagedFile(name, "the file can't be read") from None
        try:
            return cls._from(disk.document_from(content))
        except InvalidInput as error:
            raise DamagedFile(name, str(error)) from None

    def of(self, agent: str) -> Agent:
        """The agent of that id."""
        return self._known.get(agent) or Agent(agent, agent)

    @classmethod
    def _from(cls, document: Mapping[str, Any]) -> Agents:
        listed = document.get("agents")
        if not isinstance(listed, list) or not all(isinstance(member, dict) for member in listed):
            raise InvalidInput("this must be an object with a list of agents")
        known = [_agent(member) for member in listed]
        if len({agent.id for agent in known}) != len(known):
            raise InvalidInput("an agent is there twice")
        return cls(known)


def filled(command: Sequence[str], said: Mapping[str, str]) -> list[str]:
    """The arguments of a command, with what is to be said in the place of each placeholder.

    What is put in is not looked at again: braces in it stay braces, and an argument stays one argument.
    """
    return [_PLACE.sub(lambda match: said[match[1]], argument) for argument in command]


def _agent(document: Mapping[str, Any]) -> Agent:
    given = {field: value for field, value in document.items() if value not in ("", None)}
    if "agent_id" not in given:
        raise InvalidInput("an agent needs an agent_id")
    identity = fields.agent(given["agent_id"])
    name = fields.name(given.get("agent_name", identity), "an agent's agent_name")
    limit = given.get("timeout_seconds", DEFAULT_COMMAND_SECONDS)
    if type(limit) not in (int, float) or not limit:
        raise InvalidInput("timeout_seconds must be a number, and more than 0")
    seconds = values.non_negative(limit, "timeout_seconds")
    command = given.get("command")
    return Agent(identity, name, None if command is None else _command(command), seconds)


def _command(given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not given or not all(isinstance(member, str) for member in given):
        raise InvalidInput("a command must be a list of arguments, each a text; there is no shell")
    arguments = tuple(fields.prose(member, "an argument") for member in given)
    if not arguments[0]:
        raise InvalidInput("a command must begin with a program")
    for argument in arguments:
        unknown = [match[1] for match in _PLACE.finditer(argument) if match[1] not in PLACEHOLDERS]
        if unknown:
            raise InvalidInput(f"what may stand in braces is: {', '.join(PLACEHOLDERS)}")
    return arguments
