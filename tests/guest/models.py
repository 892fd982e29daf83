"""The application's models, on a base and with a naming convention of its own."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

import tsg


class Base(DeclarativeBase):
    metadata = sa.MetaData(
        naming_convention={
            "pk": "guest_%(table_name)s_pk",
            "uq": "guest_%(table_name)s_%(column_0_name)s_uq",
            "fk": "guest_%(table_name)s_%(column_0_name)s_fk",
            "ck": "guest_%(table_name)s_%(constraint_name)s_ck",
            "ix": "guest_%(table_name)s_%(column_0_name)s_ix",
        }
    )


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(sa.Text, index=True)
    amount: Mapped[int] = mapped_column(sa.CheckConstraint("amount > 0", name="amount"))
    task_id: Mapped[str | None] = mapped_column(sa.ForeignKey(tsg.Task.id))

    task: Mapped[tsg.Task | None] = relationship(tsg.Task)
