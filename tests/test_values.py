"""What callers may pass becomes one canonical, exact built-in value, or InvalidInput and nothing else."""

from __future__ import annotations

import hashlib
import math
import re
import time
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tsg import InvalidInput, ReconcilePolicy, payload_fingerprint, values
from tsg.states import delivery_target, task_target

ID = "0f8fad5b-d9cb-469f-a165-70867728950e"
DIGEST = "0123456789abcdef" * 4
TEN_MEGABYTES = 10_000_000


class AgreeableText(str):
    """Says that it equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


class DisguisedText(str):
    def __str__(self) -> str:
        return ID


class ShortSayingText(str):
    def __len__(self) -> int:
        return 3


class LengthlessText(str):
    def __len__(self) -> int:
        raise RuntimeError("foreign")


class LengthlessBytes(bytes):
    def __len__(self) -> int:
        raise RuntimeError("foreign")


class UnencodableText(str):
    def encode(self, *_: Any) -> bytes:
        raise RuntimeError("foreign")


class OtherwiseEncodedText(str):
    def encode(self, *_: Any) -> bytes:
        return b"other"


class AgreeableFloat(float):
    def __eq__(self, other: object) -> bool:
        return True

    def __lt__(self, other: object) -> bool:
        return False

    __hash__ = float.__hash__


class RaisingFloat(float):
    def __float__(self) -> float:
        raise RuntimeError("foreign")


class Raising:
    def __float__(self) -> float:
        raise RuntimeError("foreign")


class NotQuiteANumber:
    def __float__(self) -> Any:
        return "7"


class RaisingInt(int):
    def __int__(self) -> int:
        raise RuntimeError("foreign")


class AgreeableInt(int):
    def __ge__(self, other: object) -> bool:
        return True

    __le__ = __lt__ = __gt__ = __ge__


class RaisingZone(tzinfo):
    def utcoffset(self, _: datetime | None) -> timedelta:
        raise RuntimeError("foreign")


class TimelessDatetime(datetime):
    def timestamp(self) -> float:
        return math.nan


class RaisingUuid(uuid.UUID):
    def __getattribute__(self, name: str) -> Any:
        if name == "int":
            raise RuntimeError("foreign")
        return super().__getattribute__(name)


def refuses(function: Callable[..., object], *arguments: object) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        function(*arguments)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return caught.value


@pytest.mark.parametrize(
    "written",
    [
        ID,
        ID.upper(),
        ID.replace("-", ""),
        ID.replace("-", "").upper(),
        f"{{{ID}}}",
        f"urn:uuid:{ID}",
        f"uuid:{ID}",
        uuid.UUID(ID),
        AgreeableText(ID),
        ShortSayingText(ID),
    ],
)
def test_every_common_form_of_a_uuid_becomes_its_canonical_text(written: object) -> None:
    assert values.canonical_id(written) == ID
    assert type(values.canonical_id(written)) is str


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "",
        "x",
        ID[:-1],
        ID + "0",
        f" {ID}",
        f"{ID} ",
        f"{ID}\n",
        f"{ID}\0",
        ID.replace("0", "g"),
        "\ud800" * 32,
        ID[:-1] + "\ud800",
        "٣" * 32,
        ID.encode(),
        uuid.UUID(ID).bytes,
        uuid.UUID(ID).int,
        5,
        5.0,
        True,
        [],
        {},
        object(),
        (ID,),
        AgreeableText("not an id"),
        DisguisedText("not an id"),
        ShortSayingText("a" * 2000),
    ],
)
def test_what_is_no_uuid_is_refused(wrong: object) -> None:
    refuses(values.canonical_id, wrong)


@pytest.mark.parametrize(
    "wrong", [RaisingUuid(ID), object.__new__(uuid.UUID)], ids=["a raising subclass", "a half-made one"]
)
def test_a_uuid_object_that_cannot_say_its_number_is_refused(wrong: object) -> None:
    refuses(values.canonical_id, wrong)


def test_an_optional_id_may_be_left_out() -> None:
    assert values.optional_id(None) is None
    assert values.optional_id(ID.upper()) == ID
    refuses(values.optional_id, "")


@pytest.mark.parametrize(
    ("given_value", "number"),
    [
        (5, 5.0),
        (0, 0.0),
        (-3, -3.0),
        (1.5, 1.5),
        (2**1023, float(2**1023)),
        ("5", 5.0),
        (" 5 ", 5.0),
        ("-2.5e3", -2500.0),
        ("1_000", 1000.0),
        ("٣", 3.0),
        (b"5", 5.0),
        (b"1e3", 1000.0),
        (bytearray(b"6"), 6.0),
        (Decimal("1.25"), 1.25),
        (Fraction(1, 4), 0.25),
        (AgreeableFloat(4.0), 4.0),
        (AgreeableText("4"), 4.0),
        (1e-320, 1e-320),
        (1.7976931348623157e308, 1.7976931348623157e308),
    ],
)
def test_numbers_and_what_reads_as_one_are_numbers(given_value: object, number: float) -> None:
    result = values.number(given_value, "it")
    assert result == number
    assert type(result) is float


NOT_NUMBERS = [
    None,
    True,
    False,
    "",
    "abc",
    "0x10",
    "5,0",
    "nan",
    "inf",
    "-Infinity",
    "1e999",
    "\ud800",
    "5\0",
    b"",
    b"\xff",
    b"nan",
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    -(10**400),
    Decimal("NaN"),
    Decimal("sNaN"),
    Decimal("1e400"),
    Fraction(10**400),
    1j,
    [],
    [5],
    {},
    object(),
    int,
    Raising(),
    RaisingFloat(5.0),
    NotQuiteANumber(),
    AgreeableFloat(math.nan),
    AgreeableText("abc"),
]


@pytest.mark.parametrize("wrong", NOT_NUMBERS, ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_finite_number_is_refused_everywhere(wrong: object) -> None:
    refuses(values.number, wrong, "it")
    refuses(values.non_negative, wrong, "it")
    refuses(values.moment, wrong)
    refuses(values.clock_reading, lambda: wrong)
    refuses(ReconcilePolicy, wrong)
    refuses(ReconcilePolicy, 600, wrong)


@pytest.mark.parametrize("wrong", [LengthlessText("5"), LengthlessBytes(b"5")], ids=["text", "bytes"])
def test_text_whose_length_raises_brings_no_foreign_exception_along(wrong: object) -> None:
    try:
        assert values.number(wrong, "it") == 5.0
    except InvalidInput:
        pass


@pytest.mark.parametrize("wrong", [-1, -0.5, "-1", b"-1e-9", -1e-320])
def test_a_duration_is_not_negative(wrong: object) -> None:
    refuses(values.non_negative, wrong, "it")
    refuses(ReconcilePolicy, wrong)


@pytest.mark.parametrize("zero", [0, 0.0, -0.0, "-0", b"-0.0"])
def test_a_negative_zero_becomes_zero(zero: object) -> None:
    assert math.copysign(1.0, values.non_negative(zero, "it")) == 1.0


@pytest.mark.parametrize(
    ("given_value", "whole"),
    [(0, 0), (5000, 5000), (2**31 - 1, 2**31 - 1), (AgreeableInt(7), 7), (RaisingInt(7), 7)],
)
def test_whole_numbers_are_taken_as_they_are(given_value: object, whole: int) -> None:
    result = values.whole(given_value, "it")
    assert result == whole
    assert type(result) is int


@pytest.mark.parametrize("wrong", [None, True, -1, 2**31, 10**400, 5.0, "5", b"5", math.nan, [], AgreeableInt(-7)])
def test_what_is_no_whole_number_is_refused(wrong: object) -> None:
    refuses(values.whole, wrong, "it")


@pytest.mark.parametrize("wrong", [None, 0, 1, 1.0, "true", "", b"1", [], object()])
def test_a_flag_is_a_bool_and_nothing_that_resembles_one(wrong: object) -> None:
    refuses(values.flag, wrong, "it")
    assert values.flag(True, "it") is True
    assert values.flag(False, "it") is False


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        DIGEST[:-1],
        DIGEST + "0",
        DIGEST.upper(),
        DIGEST + "\n",
        f"{DIGEST[:-1]}g",
        "\ud800" * 64,
        "٣" * 64,
        DIGEST.encode(),
        bytes.fromhex(DIGEST),
        int(DIGEST, 16),
        True,
        [],
        AgreeableText("short"),
    ],
)
def test_a_payload_hash_is_64_lower_case_hexadecimal_digits(wrong: object) -> None:
    refuses(values.payload_digest, wrong)


def test_a_payload_hash_is_kept_as_exact_text_and_may_be_left_out() -> None:
    assert values.payload_digest(None) is None
    assert values.payload_digest(DIGEST) == DIGEST
    assert type(values.payload_digest(AgreeableText(DIGEST))) is str


@pytest.mark.parametrize("payload", ["", "text", "schöne Grüße ✓", b"", b"bytes", b"\xff\0"])
def test_a_fingerprint_is_the_sha_256_of_text_as_utf_8_or_of_bytes(payload: str | bytes) -> None:
    content = payload.encode() if isinstance(payload, str) else payload
    assert payload_fingerprint(payload) == hashlib.sha256(content).hexdigest()
    assert values.payload_digest(payload_fingerprint(payload)) == payload_fingerprint(payload)


@pytest.mark.parametrize(
    "wrong", [None, 5, True, [], {}, object(), bytearray(b"a"), memoryview(b"a"), "\ud800", "a\udfff"]
)
def test_what_is_neither_text_nor_bytes_has_no_fingerprint(wrong: Any) -> None:
    refuses(payload_fingerprint, wrong)


@pytest.mark.parametrize("kind", [UnencodableText, OtherwiseEncodedText])
def test_a_subclass_of_text_does_not_choose_its_own_fingerprint(kind: type[str]) -> None:
    assert payload_fingerprint(kind("text")) == hashlib.sha256(b"text").hexdigest()


INSTANT = datetime(2024, 3, 31, 1, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    "same",
    [
        INSTANT,
        INSTANT.astimezone(timezone(timedelta(hours=2))),
        INSTANT.astimezone(timezone(timedelta(hours=-11, minutes=-30))),
        INSTANT.timestamp(),
        int(INSTANT.timestamp()),
        str(INSTANT.timestamp()),
    ],
)
def test_an_aware_datetime_of_any_zone_is_its_utc_instant(same: object) -> None:
    assert values.moment(same) == 1711848600.0
    assert type(values.moment(same)) is float


@pytest.mark.parametrize(
    ("extreme", "seconds"),
    [
        (datetime.min.replace(tzinfo=UTC), -62135596800.0),
        (datetime.max.replace(tzinfo=UTC, microsecond=0), 253402300799.0),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-23)), microsecond=0), 253402383599.0),
    ],
)
def test_the_first_and_the_last_datetime_are_instants_too(extreme: datetime, seconds: float) -> None:
    assert values.moment(extreme) == seconds


@pytest.mark.parametrize("naive", [datetime(2024, 3, 31, 1, 30), datetime.min, datetime.max, date(2024, 3, 31)])
def test_a_naive_datetime_names_no_instant(naive: object) -> None:
    refuses(values.moment, naive)


@pytest.mark.parametrize(
    "wrong",
    [datetime(2024, 3, 31, tzinfo=RaisingZone()), TimelessDatetime(2024, 3, 31, tzinfo=UTC)],
    ids=["a zone that raises", "a time that is not finite"],
)
def test_a_datetime_that_cannot_say_its_instant_is_refused(wrong: datetime) -> None:
    refuses(values.moment, wrong)


@pytest.mark.parametrize(
    "refusing",
    [
        values.canonical_id,
        values.moment,
        values.payload_digest,
        task_target,
        delivery_target,
        lambda value: values.number(value, "it"),
        lambda value: values.non_negative(value, "it"),
        lambda value: values.whole(value, "it"),
        lambda value: values.flag(value, "it"),
    ],
)
@pytest.mark.parametrize("content", ["9", "a", "-", "{", "\ud800"])
def test_ten_megabytes_of_text_are_refused_at_once(refusing: Callable[[object], object], content: str) -> None:
    long = content * TEN_MEGABYTES
    began = time.perf_counter()
    refuses(refusing, long)
    assert time.perf_counter() - began < 0.5


@pytest.mark.parametrize("content", [b"9", b"\xff"])
def test_ten_megabytes_of_bytes_are_refused_at_once(content: bytes) -> None:
    long = content * TEN_MEGABYTES
    began = time.perf_counter()
    refuses(values.number, long, "it")
    refuses(values.number, bytearray(long), "it")
    refuses(values.canonical_id, long)
    assert time.perf_counter() - began < 0.5


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (values.canonical_id, ("secret-value",)),
        (values.number, ("secret-value", "a timeout")),
        (values.non_negative, ("-123456789", "a timeout")),
        (values.moment, ("secret-value",)),
        (values.payload_digest, ("secret-value",)),
        (task_target, ("secret-value",)),
        (delivery_target, ("secret-value",)),
    ],
)
def test_a_refusal_does_not_repeat_what_it_refuses(function: Callable[..., object], arguments: tuple[str, ...]) -> None:
    message = str(refuses(function, *arguments))
    assert message
    assert "secret" not in message
    assert "123456789" not in message


def test_a_policy_takes_what_reads_as_a_number_and_keeps_it_as_one() -> None:
    policy = ReconcilePolicy("60", b"1.5")  # type: ignore[arg-type]
    assert (policy.active_grace_seconds, policy.delivery_grace_seconds) == (60.0, 1.5)
    assert ReconcilePolicy() == ReconcilePolicy(600, 600)
    with pytest.raises(AttributeError):
        policy.active_grace_seconds = 5.0  # type: ignore[misc]


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=80)
ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(min_value=10**300, max_value=10**420),
        st.floats(),
        st.floats().map(AgreeableFloat),
        st.floats().map(RaisingFloat),
        st.floats(allow_nan=False).map(str),
        st.integers().map(lambda whole: str(whole).encode()),
        ANY_TEXT,
        ANY_TEXT.map(AgreeableText),
        st.binary(max_size=80),
        st.binary(max_size=80).map(bytearray),
        st.uuids(),
        st.uuids().map(str),
        st.uuids().map(lambda one: one.hex.upper()),
        st.uuids().map(lambda one: f"{{{one}}}"),
        st.from_regex(re.compile(r"\A[0-9a-f]{63,65}\Z")),
        st.decimals(),
        st.fractions(),
        st.complex_numbers(),
        st.datetimes(),
        st.datetimes(timezones=st.just(UTC)),
        st.dates(),
        st.timedeltas(),
        st.builds(object),
        st.builds(Raising),
        st.builds(NotQuiteANumber),
    ),
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.tuples(children), st.dictionaries(st.text(max_size=3), children, max_size=2)
    ),
    max_leaves=4,
)


def outcome(function: Callable[..., Any], *arguments: object) -> Any:
    """The value, or the class of the refusal; anything else escapes and fails the test."""
    try:
        return function(*arguments)
    except InvalidInput:
        return InvalidInput


@settings(deadline=None, max_examples=400)
@given(ANYTHING)
def test_anything_at_all_becomes_a_canonical_value_or_is_invalid_input(anything: object) -> None:
    identifier = outcome(values.canonical_id, anything)
    if identifier is not InvalidInput:
        assert type(identifier) is str
        assert identifier == str(uuid.UUID(identifier)) == values.canonical_id(identifier)

    for read in (
        lambda value: values.number(value, "it"),
        values.moment,
        lambda value: values.clock_reading(lambda: value),
    ):
        number = outcome(read, anything)
        if number is not InvalidInput:
            assert type(number) is float
            assert math.isfinite(number)
            assert read(number) == number
            assert not isinstance(anything, bool)

    duration = outcome(values.non_negative, anything, "it")
    assert duration is InvalidInput or (type(duration) is float and 0 <= duration < math.inf)

    whole = outcome(values.whole, anything, "it")
    assert whole is InvalidInput or (type(whole) is int and 0 <= whole < 2**31)

    flag = outcome(values.flag, anything, "it")
    assert flag is InvalidInput or flag is anything

    digest = outcome(values.payload_digest, anything)
    assert digest is InvalidInput or digest is None or (type(digest) is str and re.fullmatch("[0-9a-f]{64}", digest))

    fingerprint = outcome(payload_fingerprint, anything)
    assert (fingerprint is InvalidInput) or values.payload_digest(fingerprint) == fingerprint

    for target in (task_target, delivery_target):
        status = outcome(target, anything)
        assert status is InvalidInput or str.__str__(anything) == status.value  # type: ignore[arg-type]
