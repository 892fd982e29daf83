"""What the documents say is what the code does."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tsg
from tests.conftest import tsg as run
from tsg import states
from tsg.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_diagram_has_exactly_the_transitions_of_both_machines() -> None:
    (diagram,) = blocks("mermaid")
    task, delivery = diagram.split('state "delivery"')
    for drawn, machine, first in (
        (task, states.TASK_TRANSITIONS, "queued"),
        (delivery, states.DELIVERY_TRANSITIONS, "pending"),
    ):
        arrows = {(a, b.rstrip("_")) for a, b in re.findall(r"(\S+) --> (\w+)", drawn)}
        expected = {(source.value, end.value) for source, ends in machine.items() for end in ends}
        assert arrows == expected | {("[*]", first)}


def test_the_readme_python_runs(folder: Path) -> None:
    example = blocks("python")[0]
    ran = subprocess.run([sys.executable, "-W", "error", "-c", example], cwd=folder, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "0 0\n", "")


def test_the_readme_python_on_many_tasks_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (block for block in blocks("python") if "heartbeat_many" in block)
    with tsg.Ledger(folder / "many" / "tasks.sqlite") as ledger:
        running, queued = ledger.create_task().id, ledger.create_task().id
        ledger.start_task(running)
        names: dict[str, object] = {"ledger": ledger, "worker_ids": [running, queued]}
        exec(example, names)
        assert ledger.get_task(running).version == 2
    assert names["not_running"] == [queued]
    assert capsys.readouterr().out == "0 0\n0\n"


FILES = {
    "# application.py\n": "application.py",
    "# migrations/env.py\n": "migrations/env.py",
    "# one history: where the Config is made\n": "config.py",
}
ORDERS = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "a1", None, ("application",), {depends_on!r}


def upgrade():
    op.create_table(
        "orders",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("item", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column(
            "task_id",
            sa.String(36).with_variant(sa.UUID(as_uuid=False), "postgresql"),
            sa.ForeignKey("tsg_tasks.id"),
            nullable=False,
        ),
    )


def downgrade():
    op.drop_table("orders")
"""
SAID = [
    "0",
    "it has succeeded already",
    "a trigger keeps it as it is",
    "another worker has it",
    "in AUTOCOMMIT a task and its event could be parted",
]


@pytest.mark.parametrize("history", ["two histories", "one history"])
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_the_chapter_for_applications_can_be_followed_step_by_step(
    request: pytest.FixtureRequest, folder: Path, database: str, history: str
) -> None:
    chapter = README[README.index("## At home in your application") : README.index("## Measured")]
    program = []
    (folder / "migrations" / "versions").mkdir(parents=True)
    for block in re.findall(r"```python\n(.*?)```", chapter, flags=re.DOTALL):
        name = next((name for start, name in FILES.items() if block.startswith(start)), None)
        if name is None:
            program.append(block)
        else:
            (folder / name).write_text(block)
    one = history == "one history"
    if one:
        environment = folder / "migrations" / "env.py"
        environment.write_text(environment.read_text().replace("tsg.upgrade(engine)\n", ""))
    (folder / "migrations" / "versions" / "a1.py").write_text(ORDERS.format(depends_on="0004" if one else None))
    migrate = "from alembic import command\n" + (
        "from config import config\ncommand.upgrade(config, 'heads')\n"
        if one
        else "from alembic.config import Config\nconfig = Config()\n"
        "config.set_main_option('script_location', 'migrations')\nconfig.set_main_option('path_separator', 'os')\n"
        "config.set_main_option('sqlalchemy.url', 'sqlite:///application.sqlite')\ncommand.upgrade(config, 'head')\n"
    )
    sources = {"migrate.py": migrate, "program.py": "".join(program)}
    if database == "postgresql":
        url = request.getfixturevalue("empty_postgresql_url").render_as_string(hide_password=False)
        config = folder / "config.py"
        config.write_text(config.read_text().replace("sqlite:///application.sqlite", url))
        for source in ("sqlite+aiosqlite:///application.sqlite", "sqlite:///application.sqlite"):
            sources = {name: text.replace(source, url) for name, text in sources.items()}
    for name, source in sources.items():
        (folder / name).write_text(source)
        ran = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == SAID


def test_the_readme_commands_run_in_their_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # The example's agent is started as the README says it.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    shutil.copytree(ROOT / "examples" / "long_task", folder, dirs_exist_ok=True)
    commands = [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("tsg ") and "application" not in line
    ]
    assert len(commands) >= 5
    for command in commands:
        ran = run(*shlex.split(command)[1:])
        assert (ran.returncode, ran.stderr) == (0, b""), command


def test_the_readme_names_every_command() -> None:
    for command in COMMANDS:
        assert f"`{command}`" in README or f" {command}\n" in README or f" {command} " in README


def test_make_has_every_target_that_the_readme_names() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", README, flags=re.MULTILINE)
    wanted = {"cockpit", "demo", "test", "bench", "bench-full", "faults", "fuzz", "soak"}
    assert wanted == {first or second for first, second in named} <= targets


def test_what_the_threat_model_is_shown_by_is_there() -> None:
    text = (ROOT / "THREAT_MODEL.md").read_text()
    named = set(re.findall(r"`(?:tests/(?:faults/)?)?(test_\w+\.py)`", text))
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert {"test_kills.py", "test_guards.py", "test_privacy.py"} < named <= there
    rows = re.findall(
        r"^\| (.+) \| ([\d,]+) \| ([\d,]+) \| `make test TESTS=(tests/\S+)` \|$", text, flags=re.MULTILINE
    )
    assert len(rows) > 20
    assert {lost for _, _, lost, _ in rows} == {"0"}
    assert all((ROOT / file).is_file() for *_, file in rows)


def test_every_picture_of_the_readme_is_there() -> None:
    named = re.findall(r"!\[[^\]]+\]\((\S+)\)", README)
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_readme_reconcile_table_names_only_registered_reasons() -> None:
    registered = {
        code for codes in (*states.TASK_REASONS.values(), *states.DELIVERY_REASONS.values()) for code in codes
    }
    named = set(re.findall(r"\| `\w+`, `(\w+)` \|", README))
    assert named == {"deadline_exceeded", "restart_stale", "delivery_grace_expired", "internal_task"}
    assert named <= registered


def test_the_changelog_and_the_licence_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
    assert "Apache License" in (ROOT / project["license-files"][0]).read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", tsg.__version__)
