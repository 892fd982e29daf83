"""Hostile values, systematically: what nobody should pass, each by a description in words.

A value is made anew for every use, since many of them raise or lie as soon as they are looked at: what Hypothesis
draws, compares and prints is the description.
"""

from __future__ import annotations

import itertools
import math
import sqlite3
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import sqlalchemy as sa
from hypothesis import strategies as st

from tsg import InvalidInput, LedgerError, StateConflict

#: What must never come out again. Put together here, so that no line of a traceback has it from this file.
MARKER = "".join(("qX7", "hostile", "Z9"))
DIGITS = "".join(("86753", "09421"))

AN_ID = "0f8fad5b-d9cb-469f-a165-70867728950e"
TEN_MEGABYTES = 10_000_000


def says_nothing(ours: tuple[type[BaseException], ...], error: BaseException) -> None:
    """That an error is exactly one of these and tells nothing of what was passed, printed or looked at."""
    assert type(error) in ours
    assert str(error)
    told = "".join(traceback.format_exception(error)) + repr(error) + repr(error.args)
    for secret in (MARKER, DIGITS):
        assert secret.lower() not in told.lower()


@dataclass(frozen=True)
class Value:
    """A value to be made, and what it is in words."""

    words: str
    make: Callable[[], Any] = field(repr=False, compare=False)


def _plain(*values: object) -> tuple[Value, ...]:
    return tuple(Value(repr(value), lambda value=value: value) for value in values)


#: Texts that a shell, a path, a database or a parser would take for something else.
TEXTS: tuple[str, ...] = (
    "",
    " ",
    MARKER,
    DIGITS,
    f"{MARKER}\0",
    f"{MARKER}\n{MARKER}",
    f"\ud800{MARKER}",
    f"{MARKER}\udcff",
    f"'; DROP TABLE tsg_tasks; --{MARKER}",
    f'" OR 1=1 /*{MARKER}*/',
    f"$${MARKER}$$",
    f"%s %(x)s {{0}} :name ? {MARKER}",
    f"../../{MARKER}",
    "/dev/null",
    f"/dev/null/{MARKER}",
    f"\\\\{MARKER}\\share",
    f"file:{MARKER}?mode=memory",
    ":memory:",
    f"sqlite:///{MARKER}\0",
    f"sqlite://{MARKER}:{MARKER}@host/x?{MARKER}=1",
    f"postgresql://{MARKER}@127.0.0.1:{MARKER}/x",
    f"{MARKER}://{MARKER}",
    f"\x1b[31m{MARKER}\x07",
    f"{MARKER}\u202e💥",
    "null",
    "None",
    "true",
    f"--{MARKER}",
    f"{AN_ID}{MARKER}",
    f"{{{AN_ID}}}",
    f"urn:uuid:{AN_ID}",
    f" {AN_ID}",
    AN_ID.replace("-", "").upper(),
    "٣" * 32,
    "queued",
    "SUCCEEDED",
    "failed\0",
    "F" * 64,
    "f" * 64,
    "f" * 63 + "\n",
)

#: Numbers as text, and what nearly is one.
NUMERIC_TEXTS: tuple[str, ...] = (
    "1e3",
    "٣",
    "1_000",
    " 5 ",
    "+7",
    "-0",
    "-0.0",
    "5e-324",
    "1e308",
    "1e309",
    f"-{DIGITS}",
    "nan",
    "Infinity",
    "-inf",
    "0x10",
    "5,0",
    "1__0",
    "5\0",
    "9" * 400,
    "9" * 5000,
    "0" * 2000 + "1",
)


def _endless(made: Callable[[], object]) -> Iterator[object]:
    """As good as endless: who reads so far reads on for ever. It ends only so that a test does."""
    for _ in range(20_000):
        yield made()
    raise RuntimeError(f"{MARKER}: read to the end of what has none")


def _raising_iterator(error: Exception) -> Iterator[object]:
    yield AN_ID
    raise error


def _nested(depth: int, kind: Callable[[Any], Any], seed: Any) -> Any:
    for _ in range(depth):
        seed = kind(seed)
    return seed


def _cyclic() -> list[Any]:
    inside: list[Any] = [MARKER]
    inside.append(inside)
    return inside


NUMBERS: tuple[Value, ...] = (
    *_plain(0, -1, 1, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, int(DIGITS), -int(DIGITS)),
    *_plain(0.0, -0.0, 5e-324, -5e-324, 1e16, 1e17, math.nan, math.inf, -math.inf, 1.7976931348623157e308, -1e308),
    *_plain(float(f"{DIGITS}.5"), 1j, complex(math.nan, 1)),
    *(Value(f"10**{power}", lambda power=power: 10**power) for power in (22, 308, 309, 400, 5000, 100_000)),
    Value("-10**400", lambda: -(10**400)),
    *(
        Value(f"Decimal({text!r})", lambda text=text: Decimal(text))
        for text in ("1.5", "-0", "NaN", "sNaN", "Infinity", "1e400", "1e999999", "1e-999999", f"{DIGITS}e9")
    ),
    *(
        Value(f"Fraction of {words}", lambda over=over, under=under: Fraction(over, under))
        for words, over, under in (
            ("1 and 3", 1, 3),
            ("10**400 and 1", 10**400, 1),
            ("10**400 and 10**399+1", 10**400, 10**399 + 1),
        )
    ),
    *_plain(True, False),
)

CONTAINERS: tuple[Value, ...] = (
    *_plain(None, NotImplemented, ..., object, int, len, (), [], {}, set(), frozenset(), range(3), slice(1)),
    *_plain([MARKER], (AN_ID,), {MARKER: MARKER}, {AN_ID: AN_ID}, [[AN_ID]], [None], [True], {5}, (MARKER.encode(),)),
    Value("a list in lists, 2,000 deep", lambda: _nested(2_000, lambda inside: [inside], MARKER)),
    Value("a tuple in tuples, 100,000 deep", lambda: _nested(100_000, lambda inside: (inside,), MARKER)),
    Value("a dict in dicts, 2,000 deep", lambda: _nested(2_000, lambda inside: {MARKER: inside}, 5)),
    Value("a list that holds itself", _cyclic),
    Value("range(10**18)", lambda: range(10**18)),
    Value("a generator of ids that raises", lambda: _raising_iterator(RuntimeError(MARKER))),
    Value("a generator of ids that raises an error of ours", lambda: _raising_iterator(StateConflict(MARKER))),
    Value("a generator of ids that raises KeyError", lambda: _raising_iterator(KeyError(MARKER))),
    Value("an endless generator of text that is no id", lambda: _endless(lambda: MARKER)),
    Value("an endless generator of None", lambda: _endless(lambda: None)),
    Value("map of int over text", lambda: map(int, [MARKER])),
)

LARGE: tuple[Value, ...] = (
    *(
        Value(f"10 MB of {content!r}", lambda content=content: content * TEN_MEGABYTES)
        for content in ("9", "a", "-", "{", " ", "\0", "\ud800", "٣", b"9", b"\xff", b" ")
    ),
    Value("10 MB bytearray", lambda: bytearray(b"9" * TEN_MEGABYTES)),
    Value("10 MB of the marker", lambda: MARKER * (TEN_MEGABYTES // len(MARKER))),
    Value("10 MB of SQL", lambda: "';--" * (TEN_MEGABYTES // 4)),
    Value("10 MB of path", lambda: "../x" * (TEN_MEGABYTES // 4)),
    Value("10 MB URL", lambda: "sqlite:///" + "a" * TEN_MEGABYTES),
    Value("10 MB URL with a query", lambda: "postgresql://h/x?" + "a=b&" * (TEN_MEGABYTES // 4)),
)

TEXTUAL: tuple[Value, ...] = (
    *_plain(*TEXTS, *NUMERIC_TEXTS),
    *_plain(*(text.encode("utf-8", "surrogatepass") for text in (*TEXTS, *NUMERIC_TEXTS))),
    *_plain(b"7", b"\xff\xfe", MARKER.encode(), bytearray(b"7"), bytearray(MARKER.encode()), memoryview(b"7")),
)


# -- what lies -------------------------------------------------------------------------------------------

#: Raised by what is looked at; a LedgerError of somebody else's is no more ours than the rest.
_ERRORS: tuple[Callable[[], Exception], ...] = (
    *(
        lambda kind=kind: kind(MARKER)
        for kind in (
            RuntimeError,
            TypeError,
            AttributeError,
            KeyError,
            OSError,
            MemoryError,
            StopIteration,
            sqlite3.OperationalError,
            sa.exc.ArgumentError,
            LedgerError,
            InvalidInput,
            StateConflict,
        )
    ),
    lambda: UnicodeDecodeError("utf-8", MARKER.encode(), 0, 1, MARKER),
)


def _raiser(make: Callable[[], Exception]) -> Callable[..., Any]:
    def raises(*_: object, **__: object) -> Any:
        raise make()

    return raises


def _teller(answer: object) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _changing() -> Callable[..., Any]:
    answers = itertools.cycle((True, False, 5, MARKER, None, -1.5, 10**400, b"5", [MARKER]))
    return lambda *_, **__: next(answers)


#: What a method does instead of its own job, by words.
BEHAVIOURS: dict[str, Callable[[], Callable[..., Any]]] = {
    **{f"raises {make()!r:.30}": lambda make=make: _raiser(make) for make in _ERRORS},
    **{
        f"returns {answer!r:.30}": lambda answer=answer: _teller(answer)
        for answer in (True, False, None, 0, 7, -1, 2**40, 10**400, 7.5, math.nan, MARKER, AN_ID, MARKER.encode(), ())
    },
    "returns the class str": lambda: _teller(str),
    "returns the class bool": lambda: _teller(bool),
    "returns the class int": lambda: _teller(int),
    "returns the class list": lambda: _teller(list),
    "returns an endless iterator": lambda: lambda *_, **__: _endless(lambda: MARKER),
    "returns something else each time": _changing,
}

#: The methods that lie; a property where Python asks for no call.
METHODS: tuple[str, ...] = tuple(
    """
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __bool__ __len__ __iter__ __contains__ __getitem__
    __str__ __repr__ __format__ __float__ __int__ __index__ __complex__ __trunc__ __bytes__ __fspath__
    __add__ __radd__ __sub__ __rsub__ __neg__ __mod__ __call__ __getattr__ __getattribute__ __class__
    encode decode startswith replace strip split lower utcoffset timestamp items keys flush connection
    """.split()
)
_PROPERTIES = ("__class__",)

#: What the lies are told on top of, by words: the class, and an instance's arguments.
BASES: dict[str, tuple[type, tuple[Any, ...]]] = {
    "str, an id": (str, (AN_ID,)),
    "str, a status": (str, ("failed",)),
    "str, a number": (str, ("5",)),
    "str, a digest": (str, ("f" * 64,)),
    "str, a URL": (str, (f"sqlite:///{MARKER}",)),
    "str, rubbish": (str, (MARKER,)),
    "bytes, a number": (bytes, (b"5",)),
    "bytes, rubbish": (bytes, (MARKER.encode(),)),
    "bytearray": (bytearray, (b"5",)),
    "int": (int, (5,)),
    "a negative int": (int, (-5,)),
    "float": (float, (5.5,)),
    "nan": (float, (math.nan,)),
    "UUID": (uuid.UUID, (AN_ID,)),
    "datetime": (datetime, (2024, 3, 31, 1, 30, 0, 0, UTC)),
    "list": (list, ([AN_ID],)),
    "dict": (dict, ({AN_ID: AN_ID},)),
    "Decimal": (Decimal, ("5.5",)),
    "object": (object, ()),
    "Exception": (Exception, (MARKER,)),
}


def lie(base: str, method: str, behaviour: str) -> Value:
    """An instance of a subclass of `base` one of whose methods does something else."""

    def make() -> object:
        kind, arguments = BASES[base]
        instead = BEHAVIOURS[behaviour]()
        body: dict[str, Any] = {method: property(instead) if method in _PROPERTIES else instead}
        if method == "__eq__":
            body["__hash__"] = kind.__hash__
        made: Any = type("Liar", (kind,), body)
        return kind.__new__(made, *arguments) if kind is not uuid.UUID else _uuid(made)

    return Value(f"{base}, whose {method} {behaviour}", make)


def _uuid(kind: Any) -> object:
    made = object.__new__(kind)
    object.__setattr__(made, "int", uuid.UUID(AN_ID).int)
    object.__setattr__(made, "is_safe", uuid.SafeUUID.unknown)
    return made


def _all_lie(behaviour: str) -> Value:
    """Something all of whose methods lie the same way."""

    def make() -> object:
        body: dict[str, Any] = {name: BEHAVIOURS[behaviour]() for name in METHODS if name not in _PROPERTIES}
        return type("Liar", (), body)()

    return Value(f"an object all of whose methods do this: {behaviour}", make)


ALL_LIE: tuple[Value, ...] = tuple(map(_all_lie, BEHAVIOURS))
HALF_MADE: tuple[Value, ...] = (
    Value("a UUID that was never initialised", lambda: object.__new__(uuid.UUID)),
    Value("a URL of the wrong types", lambda: sa.URL(MARKER, 5, 5, 5, "x", [], {5: 5})),  # type: ignore[arg-type]
    Value("a URL with a name that is no text", lambda: sa.URL(5, None, None, None, None, None, {})),  # type: ignore[arg-type]
    Value("a URL with a database that is no text", lambda: sa.URL.create("sqlite")._replace(database=5)),  # type: ignore[arg-type]
    Value("a URL with nothing but a name", lambda: sa.URL.create("sqlite")),
    Value("a URL of another database", lambda: sa.URL.create("mysql", MARKER, MARKER, "127.0.0.1", 1, MARKER)),
    Value("a URL of no driver", lambda: sa.URL.create(f"postgresql+{MARKER}", MARKER, MARKER, "127.0.0.1", 1)),
)

#: Everything that is no lie, each once.
ODD: tuple[Value, ...] = (*NUMBERS, *CONTAINERS, *TEXTUAL, *ALL_LIE, *HALF_MADE)

lies = st.builds(lie, st.sampled_from(sorted(BASES)), st.sampled_from(METHODS), st.sampled_from(sorted(BEHAVIOURS)))

#: Any hostile value at all.
values = st.one_of(
    st.sampled_from(ODD),
    lies,
    lies,
    st.one_of(
        st.text(st.characters(exclude_categories=()), max_size=40),
        st.binary(max_size=40),
        st.integers(),
        st.floats(),
        st.lists(st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)), max_size=3),
    ).map(lambda value: Value(repr(value), lambda: value)),
)

#: What a command line can be given.
texts = st.one_of(st.sampled_from((*TEXTS, *NUMERIC_TEXTS)), st.text(st.characters(exclude_categories=()), max_size=40))


#: Those of :data:`BEHAVIOURS` that differ most from each other.
FEW_BEHAVIOURS: tuple[str, ...] = tuple(
    words
    for words in BEHAVIOURS
    if words.startswith(("raises Runtime", "raises Invalid", "returns the class", "returns an", "returns something"))
    or words in {f"returns {answer!r}" for answer in (True, None, -1, 7.5, MARKER)}
)


def every_lie() -> Iterator[Value]:
    """Each lie there is, one after the other."""
    for base, method, behaviour in itertools.product(BASES, METHODS, FEW_BEHAVIOURS):
        yield lie(base, method, behaviour)
