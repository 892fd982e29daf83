"""Many at one plan at once, on either database: every step is done once, in order, and no edit is lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.faults.writers import Zygote
from tests.test_concurrency import Place, named, processes
from tests.test_storage import posix
from tsg import Ledger, Plans, TaskRecord

pytestmark = posix


@pytest.fixture
def place(request: pytest.FixtureRequest, place: Place) -> Place:
    """A place for plans where the tables are there already."""
    with Ledger(place) as ledger:
        Plans(ledger)
    return place


@pytest.fixture
def ledger(place: Place) -> Iterator[Ledger]:
    """With the real time, as the processes have it."""
    with Ledger(place, busy_timeout_ms=60_000) as opened:
        yield opened


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


def attempts_of(ledger: Ledger, plan: str) -> list[TaskRecord]:
    return ledger.children_of(Plans(ledger).show(plan)["root"])


def is_completed(ledger: Ledger, plan: str) -> bool:
    view = Plans(ledger).show(plan)
    return (view["status"], ledger.get_task(view["root"]).status) == ("completed", "succeeded")


# -- one step, many hands --------------------------------------------------------------------------------

#: What is forked has opened the plans and compiled its statements before.
WARM = """
from tsg import Plans

ledger = Ledger(sys.argv[1], busy_timeout_ms=60_000)
plans = Plans(ledger)
plans.create("warm", base_seconds=0)
plans.add_step("warm", subject="Warm up")
plans.add_step("warm", subject="Come after", blocked_by=["T-001"])
warm = plans.claim("warm", "agent")
plans.fail("warm", "T-001", attempt=warm["attempt"])
plans.open("warm", "T-001")
warm = plans.start("warm", "T-001", agent="agent")
plans.heartbeat(warm["attempt"], output="so far")
plans.complete("warm", "T-001", attempt=warm["attempt"], learnings=["how"])
plans.update("warm", "T-002", subject="Be last", add_blocked_by=["T-001"])
plans.advance("warm")
plans.show("warm")
plans.remove("warm")
"""

CLAIMERS = """
def go(target, index, barrier, plans_of_rounds):
    won = []
    for plan in plans_of_rounds:
        barrier.wait()
        step = plans.claim(plan, f"agent-{index}")
        won.append(None if step is None else step["id"])
        barrier.wait()
        if step is not None:
            plans.complete(plan, step["id"], attempt=step["attempt"])
    return won
"""


@pytest.mark.parametrize("one_plan", [True, False], ids=["a step after the other", "a plan after the other"])
def test_b34_of_eight_processes_that_claim_one_step_exactly_one_gets_it(
    plans: Plans, ledger: Ledger, place: Place, one_plan: bool
) -> None:
    rounds = 50 if one_plan else 10
    names = ["plan"] * rounds if one_plan else [f"plan {number}" for number in range(rounds)]
    keys = [f"T-{number + 1:03d}" if one_plan else "T-001" for number in range(rounds)]
    for name in dict.fromkeys(names):
        plans.create(name)
    for name, before in zip(names, [None, *keys] if one_plan else [None] * rounds, strict=False):
        plans.add_step(name, subject="Be done once", blocked_by=[] if before is None else [before])
    won = processes(place, 8, WARM + CLAIMERS, names)
    for number in range(rounds):
        assert sorted(filter(None, (answers[number] for answers in won))) == [keys[number]]
    for name in dict.fromkeys(names):
        assert is_completed(ledger, name)
        assert [step["attempts"] for step in plans.steps(name, all=True)] == [1] * (rounds if one_plan else 1)
        assert len(attempts_of(ledger, name)) == (rounds if one_plan else 1)
    assert plans.doctor()["healthy"]


STARTERS = """
def go(target, index, barrier, keys):
    found = []
    for key in keys:
        barrier.wait()
        try:
            found.append(plans.start("plan", key, agent=f"agent-{index}")["session_id"])
        except StateConflict as error:
            found.append(error.retriable)
    return found
"""


@pytest.mark.parametrize("opened", [False, True], ids=["ready", "opened before"])
def test_of_two_that_start_one_step_at_the_same_moment_one_gets_it_and_the_other_is_told(
    plans: Plans, ledger: Ledger, place: Place, opened: bool
) -> None:
    plans.create("plan")
    keys = [plans.add_step("plan", subject="Be started once")["id"] for _ in range(15)]
    if opened:
        for key in keys:
            plans.open("plan", key)
    found = processes(place, 2, WARM + STARTERS, keys)
    for number in range(15):
        (session,) = (answers[number] for answers in found if isinstance(answers[number], str))
        assert plans.get("plan", keys[number])["session_id"] == session
    # What is not a session is a refusal, and no use in trying again.
    assert Counter(answer for answers in found for answer in answers if not isinstance(answer, str)) == {False: 15}
    assert [task.status for task in attempts_of(ledger, "plan")] == ["running"] * 15
    assert plans.doctor()["healthy"]


# -- a whole plan ----------------------------------------------------------------------------------------

WORKERS = """
def go(target, index, barrier, argument):
    told = {"done": [], "refused": 0, "retriable": 0}
    barrier.wait()
    while plans.show("plan")["status"] != "completed":
        try:
            step = plans.claim("plan", f"agent-{index % 4}")
            if step is None:
                time.sleep(0.05)
                continue
            plans.heartbeat(step["attempt"])
            plans.complete("plan", step["id"], attempt=step["attempt"], learnings=[f"of {step['id']}"])
            told["done"].append(step["id"])
        except StateConflict as error:
            told["retriable" if error.retriable else "refused"] += 1
    return told
"""


def a_plan_of_many(plans: Plans, count: int, **defaults: object) -> dict[str, list[str]]:
    """A plan in which most steps wait for some others; what each waits for."""
    chance = random.Random(count)
    plans.create("plan", **defaults)  # type: ignore[arg-type]
    waits: dict[str, list[str]] = {}
    for number in range(count):
        before = chance.sample(sorted(waits), min(number, chance.randrange(4)))
        owner = chance.choice((None, None, f"agent-{chance.randrange(4)}"))
        waits[plans.add_step("plan", subject=f"Do part {number}", blocked_by=before, owner=owner)["id"]] = before
    return waits


def test_eight_processes_work_through_a_plan_of_sixty_steps_each_once_and_in_order(
    plans: Plans, ledger: Ledger, place: Place
) -> None:
    waits = a_plan_of_many(plans, 60)
    told = processes(place, 8, WARM + WORKERS)
    assert sorted(key for each in told for key in each["done"]) == sorted(waits)
    assert sum(1 for each in told if each["done"]) > 1
    assert [(each["refused"], each["retriable"]) for each in told] == [(0, 0)] * 8
    tasks = attempts_of(ledger, "plan")
    assert [task.status for task in tasks] == ["succeeded"] * 60
    ended = [learning["step"] for learning in plans.learnings("plan")]
    assert sorted(ended) == sorted(waits)
    for key, before in waits.items():
        assert all(ended.index(blocker) < ended.index(key) for blocker in before)
    assert is_completed(ledger, "plan")
    assert plans.doctor()["healthy"]
    require_order(place, waits)


def require_order(place: Place, waits: dict[str, list[str]]) -> None:
    """That the ledger has no attempt of a step created before the last one of each of its blockers had succeeded."""
    query = """
        SELECT steps.key, t.created_at, t.ended_at, t.status FROM tsg_tasks t
        JOIN tsg_plan_attempts attempts ON attempts.id = t.id JOIN tsg_plan_steps steps ON steps.pk = attempts.step_pk
    """
    engine = sa.create_engine(place if isinstance(place, sa.URL) else f"sqlite:///{place}", poolclass=sa.NullPool)
    with engine.connect() as connection:
        rows = connection.execute(sa.text(query)).all()
    succeeded = {key: ended_at for key, _, ended_at, status in rows if status == "succeeded"}
    for key, created_at, _, _ in rows:
        assert all(succeeded[blocker] <= created_at for blocker in waits[key])


FINISHERS = """
def go(target, index, barrier, rounds):
    for plan, steps in rounds:
        barrier.wait()
        key, attempt = steps[index]
        plans.complete(plan, key, attempt=attempt)
"""


def test_the_last_two_steps_completed_at_the_same_moment_complete_the_plan(
    plans: Plans, ledger: Ledger, place: Place
) -> None:
    rounds = []
    for number in range(15):
        name = f"plan {number}"
        plans.create(name)
        for subject in ("One half", "The other half"):
            plans.add_step(name, subject=subject)
        claimed = [plans.claim(name, "agent") for _ in range(2)]
        rounds.append((name, [(step["id"], step["attempt"]) for step in claimed if step is not None]))
    processes(place, 2, WARM + FINISHERS, rounds)
    for name, _ in rounds:
        assert is_completed(ledger, name)
    assert plans.doctor()["healthy"]


ADVANCERS = """
def go(target, index, barrier, rounds):
    found = []
    for plan in rounds:
        barrier.wait()
        found.append([step["id"] for step in plans.advance(plan)])
    return found
"""


def test_what_has_ended_is_folded_once_by_four_processes_that_advance_at_once(
    plans: Plans, ledger: Ledger, place: Place
) -> None:
    rounds = [f"plan {number}" for number in range(6)]
    for name in rounds:
        plans.create(name, retries=5, base_seconds=0)
        for timeout in (0.001, 60, 60):
            plans.add_step(name, subject="Be started, and ended by somebody else", timeout_seconds=timeout)
        plans.add_step(name, subject="Come after", blocked_by=["T-003"])
        tokens = {key: plans.start(name, key)["attempt"] for key in ("T-003", "T-002", "T-001")}
        # The third is to be timed out, by whoever is first.
        ledger.close_task(tokens["T-002"], "failed")
        ledger.close_task(tokens["T-003"], "succeeded")
    found = processes(place, 4, WARM + ADVANCERS, rounds)
    for number, name in enumerate(rounds):
        # The retries have no delay, so that each finds all that is free.
        assert [answers[number] for answers in found] == [["T-001", "T-002", "T-004"]] * 4
        steps = plans.steps(name, all=True)
        assert [step["status"] for step in steps] == ["pending", "pending", "completed", "pending"]
        assert [step["attempts"] for step in steps] == [1, 1, 1, 0]
        assert sorted(task.status for task in attempts_of(ledger, name)) == ["failed", "succeeded", "timed_out"]
    query = sa.text("SELECT failures, count(*) FROM tsg_plan_steps GROUP BY failures ORDER BY failures")
    assert [tuple(row) for row in ledger.read(lambda connection, _: connection.execute(query).all())] == [
        (0, 12),
        (1, 12),
    ]
    assert plans.doctor()["healthy"]


# -- edits -----------------------------------------------------------------------------------------------

EDITORS = """
def go(target, index, barrier, keys):
    retriable = 0
    barrier.wait()
    for number, key in enumerate(keys[index]):
        if number % 2:
            plans.update("plan", "T-001", add_blocked_by=[key])
        else:
            plans.update("plan", key, add_blocks=["T-001"], subject=f"Named by {index}")
    return len(keys[index])
"""


def shares(plans: Plans) -> list[list[str]]:
    """Of a plan's hundred steps, beside the first one that is to wait for all, those that each of four edits."""
    plans.create("plan")
    plans.add_step("plan", subject="Wait for all")
    keys = [plans.add_step("plan", subject="Be waited for")["id"] for _ in range(100)]
    return [keys[index::4] for index in range(4)]


def require_no_edit_lost(plans: Plans, keys: list[list[str]]) -> None:
    first, *others = plans.steps("plan")
    assert sorted(first["blockedBy"]) == sorted(first["waitingFor"]) == sorted(key for share in keys for key in share)
    subjects = {step["id"]: step["subject"] for step in others}
    for index, share in enumerate(keys):
        assert [subjects[key] for key in share[::2]] == [f"Named by {index}"] * 13
        assert [subjects[key] for key in share[1::2]] == ["Be waited for"] * 12
    assert all(step["blocks"] == ["T-001"] for step in others)
    assert plans.doctor()["healthy"]


def test_b39_four_processes_with_twenty_five_edits_each_lose_none(plans: Plans, place: Place) -> None:
    keys = shares(plans)
    assert processes(place, 4, WARM + EDITORS, keys) == [25] * 4
    require_no_edit_lost(plans, keys)


def test_b39_a_hundred_commands_four_at_a_time_lose_no_edit(
    plans: Plans, place: Place, zygote: Zygote, tmp_path: Path
) -> None:
    keys = shares(plans)
    output = tmp_path / "output"
    for number in range(25):
        running = []
        for index in range(4):
            key = keys[index][number]
            words = ["T-001", "--add-blocked-by", key]
            if number % 2 == 0:
                words = [key, "--add-blocks", "T-001", "--subject", f"Named by {index}"]
            command = ["--db", named(place), "step", "update", "plan", *words]
            running.append(zygote.start("command", arguments=command, output=str(output)))
        assert [zygote.wait(process) for process in running] == [0] * 4, output.read_text()
    assert output.read_text().count('"ok":true') == 100
    require_no_edit_lost(plans, keys)


# -- sudden ends -----------------------------------------------------------------------------------------

MORTALS = """
import collections, os, signal

def work(target, index, log):
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    while plans.show("plan")["status"] != "completed":
        step = None
        try:
            step = plans.claim("plan", f"agent-{index}")
            if step is None:
                time.sleep(0.02)
                continue
            os.write(said, f"has {step['id']} {step['attempt']}\\n".encode())
            plans.heartbeat(step["attempt"], output="so far")
            plans.complete("plan", step["id"], attempt=step["attempt"], learnings=[f"of {step['id']}"])
            os.write(said, f"did {step['id']} {step['attempt']}\\n".encode())
        except StateConflict as error:
            # Late, on a machine that has a lot to do: the attempt's time was over.
            os.write(said, f"{'retriable' if error.retriable else 'late'} - -\\n".encode())

def hire(target, index, log):
    process = os.fork()
    if process == 0:
        status = 99
        try:
            work(target, index, log)
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(status)
    return process

def look(target):
    assert plans.doctor()["healthy"], plans.doctor()
    live = collections.Counter()
    for row in ledger.read(lambda connection, _: connection.execute(sa.text(
        "SELECT attempts.step_pk FROM tsg_plan_attempts attempts JOIN tsg_tasks t ON t.id = attempts.id "
        "WHERE t.status = 'queued' OR t.status = 'running'")).all()):
        live[row[0]] += 1
    assert set(live.values()) <= {1}, "two live attempts of one step"

def go(target, index, barrier, argument):
    log, kills, seed = argument
    chance = random.Random(seed)
    crew = [hire(target, place, log) for place in range(4)]
    killed = 0
    for number in range(kills):
        time.sleep(chance.uniform(0, 0.06))
        place = chance.randrange(4)
        os.kill(crew[place], signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(crew[place], 0)[1]) == -signal.SIGKILL
        if number % 5 == 0:
            look(target)
        crew[place] = hire(target, place, log)
    ended = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in crew]
    look(target)
    return killed, ended
"""


def test_processes_killed_while_they_claim_beat_and_complete_lose_nothing_and_do_nothing_twice(
    plans: Plans, ledger: Ledger, place: Place, tmp_path: Path
) -> None:
    waits = a_plan_of_many(plans, 100, timeout_seconds=1, grace_seconds=0.5, retries=1000, base_seconds=0)
    seed, log = random.randrange(2**32), tmp_path / "log"
    ((killed, ended),) = processes(place, 1, WARM + MORTALS, [str(log), 30, seed])
    said = [line.split() for line in log.read_text().splitlines()]
    words = Counter(word for word, _, _ in said)
    assert ended == [0] * 4, f"seed {seed}"
    assert killed > 15, f"seed {seed}: the plan was done before they could be killed"
    # Some died in the midst of it.
    assert words["did"] < words["has"], f"seed {seed}"
    assert words["retriable"] == 0, f"seed {seed}"
    steps = {step["id"]: step for step in plans.steps("plan", all=True)}
    assert {step["status"] for step in steps.values()} == {"completed"}
    assert is_completed(ledger, "plan")
    tasks = {task.id: task for task in attempts_of(ledger, "plan")}
    # What was acknowledged has happened, and was what completed the step.
    done = {key: token for word, key, token in said if word == "did"}
    assert len(done) == words["did"]
    assert {tasks[token].status for token in done.values()} == {"succeeded"}
    assert Counter(task.status for task in tasks.values())["succeeded"] == len(steps)
    assert len(tasks) == sum(step["attempts"] for step in steps.values()) > len(steps)
    assert {task.status for task in tasks.values()} == {"succeeded", "timed_out"}
    learned = [learning["step"] for learning in plans.learnings("plan")]
    assert sorted(learned) == sorted(waits), f"seed {seed}"
    require_order(place, waits)
    assert plans.doctor()["healthy"]
