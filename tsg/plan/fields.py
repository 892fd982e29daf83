"""What callers may say of plans and steps, made plain, or refused with :exc:`tsg.InvalidInput`.

A field has one name in Python, which is its column's, and one in the JSON form of the document that the plan layer
comes from; :data:`JSON_NAMES` is the one place that knows both.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from tsg import values
from tsg.errors import InvalidInput
from tsg.plan.scheduling import DEFAULT_STEP_TIMEOUT_SECONDS, RetryPolicy

__all__ = [
    "DEEPEST",
    "EXACT_STATUS",
    "JSON_NAMES",
    "LINKS",
    "PYTHON_NAMES",
    "agent",
    "compact",
    "from_json",
    "is_deeper",
    "key",
    "keys",
    "name",
    "object_from",
    "one_of",
    "optional_prose",
    "parsed",
    "plain",
    "policy",
    "prose",
    "prose_list",
    "settings",
    "step_fields",
    "step_timeout",
    "stored",
    "timeout_ms",
]

#: The most characters of a name, and of a text.
_LONGEST_NAME: Final = 200
_LONGEST_TEXT: Final = 1_000_000
_MOST: Final = 100_000
#: How deep lists and objects may stand in each other: what one Python can read, another may not.
DEEPEST: Final = 100
#: In a file's metadata, the exact status of a step where the form has no word for it; nobody else's name there.
EXACT_STATUS: Final = "tsg_status"

_KEY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")
_UNSTORABLE: Final = re.compile(r"[\x00\ud800-\udfff]")

#: What a field is called in JSON, where that is another name.
JSON_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "active_form": "activeForm",
        "blocked_by": "blockedBy",
        "thread_id": "threadID",
        "add_blocks": "addBlocks",
        "add_blocked_by": "addBlockedBy",
    }
)
#: The other way round.
PYTHON_NAMES: Final[Mapping[str, str]] = {json_name: python_name for python_name, json_name in JSON_NAMES.items()}

#: The fields that say what waits for what, each a list of keys.
LINKS: Final = ("blocked_by", "blocks", "add_blocked_by", "add_blocks")

_POLICY: Final = ("retries", "backoff", "base_seconds", "factor", "cap_seconds")


def name(value: object, what: str) -> str:
    """A name: one line of text, neither empty nor with blanks around it, of at most 200 characters."""
    written = values.text(value)
    if not written or len(written) > _LONGEST_NAME or _CONTROL.search(written) or written != written.strip():
        raise InvalidInput(f"{what} must be one line of text, of 1 to {_LONGEST_NAME} characters")
    return written


def agent(value: object) -> str:
    """The name of an agent."""
    return name(value, "an agent's name")


def key(value: object) -> str:
    """The key of a step: letters, digits, dots, hyphens and underscores, at most 64."""
    written = values.text(value)
    if written is None or _KEY.match(written) is None:
        raise InvalidInput("a step's key is made of letters, digits, dots, hyphens and underscores")
    return written


def keys(given: object) -> list[str]:
    """Keys of steps, each once, in the order given."""
    found = _listed(given, "keys", key)
    return list(dict.fromkeys(found))


def prose(value: object, what: str) -> str:
    """Text of at most a million characters, none of them one that a database can't hold."""
    written = values.text(value)
    if written is None or len(written) > _LONGEST_TEXT or _UNSTORABLE.search(written):
        raise InvalidInput(f"{what} must be text, of at most {_LONGEST_TEXT:,} characters, without NUL")
    return written


def prose_list(given: object, what: str) -> list[str]:
    """Texts, in the order given."""
    return _listed(given, what, lambda text: prose(text, what))


def optional_prose(value: object, what: str) -> str | None:
    """As :func:`prose`, with ``None`` let through."""
    return None if value is None else prose(value, what)


def one_of(value: object, kind: type[Any], what: str) -> Any:
    """A member of an enumeration of words, given as such or as its word."""
    written = values.text(value)
    for member in kind:
        if written == member.value:
            return member
    raise InvalidInput(f"{what} must be one of: {', '.join(member.value for member in kind)}")


def object_from(value: object, what: str) -> str:
    """A JSON object, as the text of ASCII characters in which it is kept.

    Raises:
        InvalidInput: no mapping, or something in it that JSON has no form for.
    """
    refused = f"{what} must be a JSON object"
    given = _mapping(value, refused)
    try:
        written = compact(given)
        # What came in with other keys than text would come out with them changed.
        again = json.loads(written)
        same: bool = again == given
    except Exception:
        raise InvalidInput(refused) from None
    if not same or len(written) > _LONGEST_TEXT or is_deeper(again, DEEPEST - 1):
        raise InvalidInput(refused)
    return written


def is_deeper(document: Any, depth: int) -> bool:
    """Whether lists and objects stand deeper in each other than that."""
    level: list[Any] = [document]
    for _ in range(depth):
        level = [
            member
            for several in level
            if isinstance(several, (dict, list))
            for member in (several.values() if isinstance(several, dict) else several)
        ]
    return any(isinstance(member, (dict, list)) for member in level)


def compact(value: object) -> str:
    """A JSON text as it is kept: of ASCII characters, without blanks.

    Raises:
        ValueError, TypeError, RecursionError: JSON has no form for it.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A step's metadata without what a file says there of its exact status."""
    return {name: value for name, value in metadata.items() if name != EXACT_STATUS}


def stored(value: Any) -> Any:
    """The value of a column as it is kept; an object as text, in which true is not 1."""
    return compact(value) if isinstance(value, dict) else value


def parsed(text: str | bytes) -> Any:
    """What a JSON text says, where JSON itself leaves no doubt.

    Raises:
        InvalidInput: no JSON, a number that is not finite, or a name that an object has twice.
    """
    try:
        found = json.loads(text, parse_constant=_refuse, object_pairs_hook=_object, parse_float=_float)
    except (ValueError, RecursionError):
        raise InvalidInput("this is no JSON, or says something twice") from None
    return found


def policy(given: object) -> dict[str, Any]:
    """The columns of a retry policy in its JSON form."""
    refused = "a retry policy has a count and a backoff, and may have base_seconds, factor, cap_seconds"
    parts = _mapping(given, refused)
    if not all(values.text(part) in ("count", *_POLICY[1:]) for part in parts):
        raise InvalidInput(refused)
    return _columns(RetryPolicy(**parts))


def settings(given: Mapping[str, object], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of what a plan sets for its steps, and a step for itself.

    Args:
        given: some of ``timeout_seconds`` (0 or ``None``: no timeout), ``retries``, ``backoff``, ``base_seconds``,
            ``factor``, ``cap_seconds``, ``retry_policy``, ``fallback_agent``, ``partial_ok``.
        defaults: the columns that hold where nothing is given.
    """
    columns: dict[str, Any] = {}
    if "timeout_seconds" in given:
        seconds = given["timeout_seconds"]
        columns["timeout_seconds"] = None if seconds is None else _timeout(seconds)
    if "retry_policy" in given:
        if any(field in given for field in _POLICY):
            raise InvalidInput("give a retry policy as a whole or by its parts, not both")
        columns |= policy(given["retry_policy"])
    elif any(field in given for field in _POLICY):
        parts: dict[str, Any] = {field: given[field] if field in given else defaults[field] for field in _POLICY}
        columns |= _columns(RetryPolicy(parts.pop("retries"), **parts))
    if "fallback_agent" in given:
        fallback = given["fallback_agent"]
        columns["fallback_agent"] = None if fallback is None else agent(fallback)
    if "partial_ok" in given:
        columns["partial_ok"] = values.flag(given["partial_ok"], "partial_ok")
    return columns


def step_fields(given: Mapping[str, object], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns that some fields of a step come down to, and what they say of dependencies.

    Args:
        given: fields by their names in Python.
        defaults: as for :func:`settings`.

    Raises:
        InvalidInput: there is no such field, or it can't have such a value.
    """
    unknown = set(given) - {*_PLAIN, *_SETTINGS, *LINKS}
    if unknown:
        raise InvalidInput("a step has no such field, or it is not one that can be set")
    columns = {field: _PLAIN[field](given[field]) for field in given if field in _PLAIN}
    columns |= settings(given, defaults)
    links = {field: keys(given[field]) for field in LINKS if field in given}
    return columns, links


def from_json(document: Mapping[str, object]) -> dict[str, object]:
    """The fields of a step by their names in Python; ``timeout_ms`` becomes seconds. Nothing is judged but that."""
    fields = {PYTHON_NAMES.get(field, field): value for field, value in document.items()}
    if "timeout_ms" in fields:
        milliseconds = fields.pop("timeout_ms")
        if milliseconds is not None and values.non_negative(milliseconds, "timeout_ms") != milliseconds:
            raise InvalidInput("timeout_ms must be a number")
        fields["timeout_seconds"] = None if milliseconds is None else float(milliseconds) / 1000
    return fields


def step_timeout() -> float:
    """Seconds that a step of a long task has which says nothing of it itself: ``TSG_STEP_TIMEOUT``, or 300.

    Raises:
        InvalidInput: what the environment says is no positive number.
    """
    said = os.environ.get("TSG_STEP_TIMEOUT")
    seconds = DEFAULT_STEP_TIMEOUT_SECONDS if not said else _timeout(values.non_negative(said, "TSG_STEP_TIMEOUT"))
    if seconds is None:
        raise InvalidInput("TSG_STEP_TIMEOUT must be more than 0 seconds")
    return seconds


def timeout_ms(seconds: float | None) -> int | float | None:
    """A timeout in milliseconds, whole where it is."""
    if seconds is None:
        return None
    milliseconds = round(seconds * 1000, 6)
    return int(milliseconds) if milliseconds.is_integer() else milliseconds


def _timeout(given: object) -> float | None:
    seconds = values.non_negative(given, "a timeout")
    milliseconds = seconds * 1000
    if not math.isfinite(milliseconds) or (seconds and not timeout_ms(seconds)):
        raise InvalidInput("a timeout must be a number in milliseconds too, neither endless nor as good as none")
    return seconds or None


def _columns(policy: RetryPolicy) -> dict[str, Any]:
    return {
        "retries": policy.count,
        "backoff": policy.backoff.value,
        "base_seconds": policy.base_seconds,
        "factor": policy.factor,
        "cap_seconds": policy.cap_seconds,
    }


def _mapping(given: object, refused: str) -> dict[Any, Any]:
    """A copy of a mapping. Whatever its own methods raise, it is refused for that."""
    # By its type: what a value says itself of its class may be a lie.
    if issubclass(type(given), Mapping):
        try:
            return dict(given)  # type: ignore[call-overload, no-any-return]  # a mapping, as was just seen
        except Exception:
            raise InvalidInput(refused) from None
    raise InvalidInput(refused)


def _listed(given: object, what: str, each: Callable[[object], str]) -> list[str]:
    refused = f"{what} must be given as a list, of at most {_MOST:,}"
    # Of text each letter would be meant.
    kind = type(given)
    if issubclass(kind, (str, bytes, bytearray, Mapping)) or not issubclass(kind, Iterable):
        raise InvalidInput(refused)
    try:
        members = list(itertools.islice(given, _MOST + 1))  # type: ignore[call-overload]  # it was just seen to be one
    except Exception:
        # Its own methods may raise anything.
        raise InvalidInput(refused) from None
    if len(members) > _MOST:
        raise InvalidInput(refused)
    return [each(member) for member in members]


def _optional(check: Callable[[object], str]) -> Callable[[object], str | None]:
    return lambda value: None if value is None else check(value)


def _metadata(value: object) -> str:
    written = object_from({} if value is None else value, "metadata")
    if EXACT_STATUS in json.loads(written):
        raise InvalidInput("metadata may not have tsg_status, by which files tell a step's exact status")
    return written


def _subject(value: object) -> str:
    written = prose(value, "a subject")
    if not written.strip():
        raise InvalidInput("a subject must say something")
    return written


_PLAIN: Final[Mapping[str, Callable[[object], Any]]] = MappingProxyType(
    {
        "subject": _subject,
        "description": lambda value: optional_prose(value, "a description"),
        "active_form": lambda value: optional_prose(value, "an active form"),
        "owner": _optional(agent),
        "metadata": _metadata,
        "params": lambda value: object_from({} if value is None else value, "params"),
        "thread_id": lambda value: optional_prose(value, "a thread's id"),
        "session_name": lambda value: optional_prose(value, "a session's name"),
        "session_resume": lambda value: optional_prose(value, "a session to resume"),
    }
)
_SETTINGS: Final = ("timeout_seconds", "retry_policy", *_POLICY, "fallback_agent", "partial_ok")


def _refuse(constant: str) -> float:
    raise ValueError(constant)


def _float(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):
        raise ValueError(written)
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("twice")
    return found
