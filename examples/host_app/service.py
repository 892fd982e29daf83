"""What happens to an order and, with it, to its task. Each function runs in the caller's transaction: both or neither.

A worker names the task that it started, not the order's present one: where the two differ, the order was given
to somebody else meanwhile, and the ledger refuses the worker (StateConflict).
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from sqlalchemy import select
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.orm import Session

import tsg
from host_app.models import Order
from tsg.reconcile import Report


class NoSuchOrder(LookupError):
    """There is no order with this number."""


class Rejected(ValueError):
    """Not an order that can be accepted."""


class Job(NamedTuple):
    """An order and the task that a worker started for it."""

    order_id: int
    task_id: str


class View(TypedDict):
    """An order as its customer sees it."""

    id: int
    item: str
    quantity: int
    packed: int
    state: str
    task: str
    task_status: str
    task_code: str | None
    delivery_status: str
    attempts: int


def place(session: Session, item: object, quantity: object, *, timeout_seconds: float) -> Order:
    """Accept an order: its row and its queued task.

    Raises:
        Rejected: it is none, here or by the table's own rules.
    """
    if not (isinstance(item, str) and 0 < len(item) <= 100 and item.isprintable() and type(quantity) is int):
        raise Rejected("an order is an item and a number of pieces")
    order = Order(item=item, quantity=quantity, task=tsg.Task(timeout_seconds=timeout_seconds))
    session.add(order)
    try:
        session.flush()
    except (IntegrityError, DataError, OverflowError):
        raise Rejected("an order is for 1 to 1000 pieces") from None
    return order


def find(session: Session, order_id: int) -> Order:
    order = session.get(Order, order_id)
    if order is None:
        raise NoSuchOrder("there is no order with this number")
    return order


def orders(session: Session) -> list[Order]:
    return list(session.scalars(select(Order).order_by(Order.id)))


def take(session: Session) -> Job | None:
    """Start the task that has been queued for longest; where another worker was quicker, ``StaleDataError``."""
    queued = (
        select(Order)
        .join(Order.task)
        .where(Order.state == "open", tsg.Task.status == tsg.TaskStatus.QUEUED)
        .order_by(tsg.Task.pk)
        .limit(1)
    )
    order = session.scalar(queued)
    if order is None:
        return None
    order.task.start()
    session.flush()
    return Job(order.id, order.task.id)


def pack_one(session: Session, job: Job) -> bool:
    """Record one piece packed, with a heartbeat; with the last one the order and its task are done.

    Returns:
        Whether there is more to pack.
    """
    order, task = session.get_one(Order, job.order_id), session.get_one(tsg.Task, job.task_id)
    task.heartbeat()
    order.packed += 1
    if order.packed < order.quantity:
        return True
    task.close("succeeded", "worker_completed")
    order.state = "done"
    return False


def give_back(session: Session, job: Job) -> None:
    """What a worker that is told to stop does with an order that it can't finish."""
    order, task = session.get_one(Order, job.order_id), session.get_one(tsg.Task, job.task_id)
    task.close("cancelled", "caller_cancelled")
    _try_again(order)


def receive(session: Session, order_id: int) -> Order:
    """The customer says that the result has arrived."""
    order = find(session, order_id)
    order.task.deliver("delivered", "transport_acknowledged")
    return order


def recover(session: Session, policy: tsg.ReconcilePolicy) -> Report:
    """Close what nobody vouches for, and put back the orders that were being worked on."""
    report = tsg.reconcile.apply(session, policy)
    given_up = select(Order).join(Order.task).where(Order.state == "open", tsg.Task.status == tsg.TaskStatus.TIMED_OUT)
    for order in session.scalars(given_up):
        _try_again(order)
    return report


def view(order: Order) -> View:
    attempts, task = 1, order.task
    while task.parent is not None:
        attempts, task = attempts + 1, task.parent
    return View(
        id=order.id,
        item=order.item,
        quantity=order.quantity,
        packed=order.packed,
        state=order.state,
        task=order.task.id,
        task_status=order.task.status.value,
        task_code=order.task.terminal_code,
        delivery_status=order.task.delivery_status.value,
        attempts=attempts,
    )


def _try_again(order: Order) -> None:
    """A retry is a new task, here the child of the one before it, which has nothing to deliver any more."""
    before = order.task
    before.deliver("failed")
    order.task = tsg.Task(parent=before, timeout_seconds=before.timeout_seconds)
