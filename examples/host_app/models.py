"""The business of this service: one table, which refers to the ledger's."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, MetaData, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

import tsg


class Base(DeclarativeBase):
    """The service's own base, which knows nothing of ``tsg.Base``."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )


class Order(Base):
    """So many pieces of an item, to be packed. Its task is the attempt that counts."""

    __tablename__ = "orders"
    __table_args__ = (
        CheckConstraint("quantity BETWEEN 1 AND 1000", name="quantity"),
        CheckConstraint("packed BETWEEN 0 AND quantity", name="packed"),
        CheckConstraint("state IN ('open', 'done') AND (state = 'open' OR packed = quantity)", name="state"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(String(100))
    quantity: Mapped[int]
    packed: Mapped[int] = mapped_column(default=0)
    state: Mapped[str] = mapped_column(String(10), default="open")
    task_id: Mapped[str] = mapped_column(ForeignKey(tsg.Task.id), unique=True)

    task: Mapped[tsg.Task] = relationship(tsg.Task)
