"""Conditions on a value that each database has its own words for: its truth, its type, its form."""

from __future__ import annotations

from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import FunctionElement

__all__ = ["boolean", "canonical_uuid", "finite", "integer", "sha256_hex", "truth", "untruth"]


class _Typed(FunctionElement[bool]):
    """A condition on a value's type and form, which each database says in its own words."""

    type = sa.Boolean()
    inherit_cache = True
    sqlite: ClassVar[str]
    #: PostgreSQL's types leave less open; what they hold already comes down to its being there.
    postgresql: ClassVar[str] = "{0} IS NOT NULL"

    def self_group(self, against: Any = None) -> Any:
        # It renders its own brackets; without this it would be compared with 1 where it is combined.
        return self


class truth(_Typed):  # noqa: N801
    """That a condition is true.

    By the word: compared with a number, as SQLAlchemy has it for SQLite, all of a condition would be worked out
    where a part decides. And not by ``is_()``, whose negation SQLAlchemy gets wrong for any word but its own.
    """

    inherit_cache = True
    sqlite = "{0} IS TRUE"
    postgresql = sqlite


class untruth(_Typed):  # noqa: N801
    """That a condition is false or NULL."""

    inherit_cache = True
    sqlite = "{0} IS NOT TRUE"
    postgresql = sqlite


class canonical_uuid(_Typed):  # noqa: N801  # reads as the SQL function it stands for
    """A UUID in canonical text."""

    inherit_cache = True
    # SQLite's text functions stop at a NUL, and would not see what hides behind it; a BLOB's length does.
    sqlite = "typeof({0}) = 'text' AND length(CAST({0} AS BLOB)) = 36 AND {0} GLOB '" + (
        "-".join("[0-9a-f]" * count for count in (8, 4, 4, 4, 12)) + "'"
    )


class sha256_hex(_Typed):  # noqa: N801
    """64 lower-case hexadecimal digits."""

    inherit_cache = True
    sqlite = (
        "typeof({0}) = 'text' AND length({0}) = 64 AND length(CAST({0} AS BLOB)) = 64 AND {0} NOT GLOB '*[^0-9a-f]*'"
    )
    postgresql = "length({0}) = 64 AND {0} !~ '[^0-9a-f]'"


class finite(_Typed):  # noqa: N801
    """A floating-point number, neither infinite nor NaN."""

    inherit_cache = True
    # Its column makes every number one of these; text and blobs are above all numbers.
    sqlite = "{0} BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308"
    # NaN is above everything there.
    postgresql = "{0} > '-Infinity'::float8 AND {0} < 'Infinity'::float8"


class integer(_Typed):  # noqa: N801
    """An integer."""

    inherit_cache = True
    sqlite = "typeof({0}) = 'integer'"


class boolean(_Typed):  # noqa: N801
    """True or false."""

    inherit_cache = True
    sqlite = "{0} IN (0, 1)"


@compiles(_Typed, "sqlite")
@compiles(_Typed, "postgresql")
def _in_its_own_words(element: _Typed, compiler: SQLCompiler, **kw: Any) -> str:
    words: str = getattr(element, compiler.dialect.name)
    return "(" + words.format(compiler.process(element.clauses.clauses[0], **kw)) + ")"
