"""What callers may pass, made canonical, or refused with :exc:`tsg.InvalidInput`.

Nothing here knows a state or a database. Whatever comes in, only exact built-in types go on: a subclass
of ``str`` or ``float`` can't bring its own idea of equality along.
"""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final, TypeGuard, TypeVar

from tsg.errors import InvalidInput

__all__ = [
    "canonical_id",
    "canonical_ids",
    "clock_reading",
    "flag",
    "is_a",
    "moment",
    "non_negative",
    "number",
    "optional_id",
    "payload_digest",
    "payload_fingerprint",
    "text",
    "whole",
]

_CANONICAL_UUID: Final = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\Z")
_UUID_DIGITS: Final = re.compile(r"[0-9a-fA-F]{32}\Z")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z")
#: Long enough for every written form of a UUID or a float; longer text is refused unread.
_LONGEST_TEXT: Final = 1024


_Kind = TypeVar("_Kind")


def is_a(value: object, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether `value` is one, whatever it says itself: ``isinstance`` would believe its ``__class__``."""
    return issubclass(type(value), kind)


def text(value: object) -> str | None:
    """`value` as an exact ``str`` where it is text, else ``None``."""
    return str.__str__(value) if is_a(value, str) else None


def canonical_id(value: object) -> str:
    """The canonical text (lower case, hyphens) of a UUID given as such or in any common written form.

    Raises:
        InvalidInput: it is not a UUID.
    """
    if type(value) is str and _CANONICAL_UUID.match(value):
        return value
    with _refusing("an id must be a UUID"):
        if is_a(value, uuid.UUID):
            return str(uuid.UUID(int=value.int))
        written = text(value)
        if written is not None and len(written) <= _LONGEST_TEXT:
            digits = written.replace("urn:", "").replace("uuid:", "").strip("{}").replace("-", "")
            if _UUID_DIGITS.match(digits):
                return str(uuid.UUID(hex=digits))
    raise InvalidInput("an id must be a UUID")


def canonical_ids(given: Iterable[object]) -> list[str]:
    """What an iterable gives, as :func:`canonical_id`, each once, in the order given.

    Raises:
        InvalidInput: no iterable, one that raises, or the first that is no UUID; nothing is taken after it.
    """
    refused = "ids must be UUIDs, in a list"
    with _refusing(refused):
        # Of text each letter would be meant.
        if not isinstance(given, (str, bytes, bytearray)):
            return list(dict.fromkeys(map(canonical_id, given)))
    raise InvalidInput(refused)


def optional_id(value: object) -> str | None:
    """As :func:`canonical_id`, with ``None`` let through."""
    return None if value is None else canonical_id(value)


def number(value: object, what: str) -> float:
    """A finite float from a number, or from text or bytes that read as one; booleans are not numbers.

    Raises:
        InvalidInput: anything else, with `what` (a fixed word, never the value) in its message.
    """
    refused = f"{what} must be a finite number"
    if not is_a(value, bool):
        with _refusing(refused):
            if isinstance(value, (str, bytes, bytearray)) and len(value) > _LONGEST_TEXT:
                raise InvalidInput(refused)
            result = float(value)  # type: ignore[arg-type]  # what is no number raises
            if math.isfinite(result):
                # Adding zero leaves every number as it is, but for negative zero.
                return float.__float__(result) + 0.0
    raise InvalidInput(refused)


def non_negative(value: object, what: str) -> float:
    """As :func:`number`, and not below zero.

    Raises:
        InvalidInput: anything else.
    """
    result = number(value, what)
    if result < 0:
        raise InvalidInput(f"{what} must not be negative")
    return result


def moment(value: object) -> float:
    """A time in seconds since the epoch, given so or as an aware ``datetime``.

    Raises:
        InvalidInput: a naive datetime, whose instant nobody can tell, or no finite number.
    """
    if is_a(value, datetime):
        with _refusing("a time must be a datetime that names an instant"):
            naive = value.utcoffset() is None
            value = value.timestamp()
        if naive:
            raise InvalidInput("a datetime needs a time zone; a naive one names no instant")
    return number(value, "a time")


def whole(value: object, what: str) -> int:
    """A whole number from zero to what a signed 32-bit field holds; booleans are not numbers.

    Raises:
        InvalidInput: anything else.
    """
    if is_a(value, int) and not is_a(value, bool):
        exact = int.__int__(value)
        if 0 <= exact < 2**31:
            return exact
    raise InvalidInput(f"{what} must be a whole number, not negative")


def at_least_one(value: object, what: str) -> int:
    """As :func:`whole`, and not zero.

    Raises:
        InvalidInput: anything else.
    """
    exact = whole(value, what)
    if not exact:
        raise InvalidInput(f"{what} must be at least 1")
    return exact


def clock_reading(clock: Callable[[], object]) -> float:
    """One reading of `clock`, in seconds since the epoch. What it raises itself is let through.

    Raises:
        InvalidInput: it can't be called, or gave no finite number.
    """
    if not callable(clock):
        raise InvalidInput("a clock must be callable")
    return number(clock(), "the clock")


def flag(value: object, what: str) -> bool:
    """`value` where it is a ``bool``.

    Raises:
        InvalidInput: anything else, 0 and 1 included.
    """
    if value is True or value is False:
        return value
    raise InvalidInput(f"{what} must be true or false")


def optional_callable(value: object, what: str) -> None:
    """That `value` can be called, or is ``None``.

    Raises:
        InvalidInput: neither.
    """
    if value is not None and not callable(value):
        raise InvalidInput(f"{what} must be callable")


def payload_digest(value: object) -> str | None:
    """A SHA-256 digest as 64 lower-case hexadecimal digits; ``None`` is let through.

    Raises:
        InvalidInput: anything else.
    """
    if value is None:
        return None
    digest = text(value)
    if digest is None or _DIGEST.match(digest) is None:
        raise InvalidInput("a payload hash must be 64 lower-case hexadecimal digits")
    return digest


def payload_fingerprint(payload: str | bytes) -> str:
    """The SHA-256 of a payload (text as UTF-8), in the form that a task's ``payload_hash`` takes.

    A fingerprint can be linked, and of a short or guessable payload it can be guessed: leave it out there,
    or pass a keyed digest of your own.

    Raises:
        InvalidInput: neither text nor bytes, or text that has no UTF-8 form.
    """
    try:
        content = str.encode(payload) if is_a(payload, str) else payload
    except UnicodeEncodeError:
        raise InvalidInput("a payload must be text or bytes") from None
    if not is_a(content, bytes):
        raise InvalidInput("a payload must be text or bytes")
    return hashlib.sha256(content).hexdigest()


@contextmanager
def _refusing(message: str) -> Iterator[None]:
    """Let nothing that a value's own methods raise reach the caller: they may raise anything, an error of ours too."""
    try:
        yield
    except Exception:
        raise InvalidInput(message) from None
