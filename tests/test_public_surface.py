"""What other programs may hold on to: names, errors, docstrings, and what an import costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

import tsg
from tsg import errors
from tsg.cli import COMMANDS, app

PACKAGE = Path(tsg.__file__).parent
#: Modules whose import is paid for only by those who need them.
COSTLY = ("sqlalchemy.orm", "alembic", "mako", "click", "rich", "starlette", "mcp", "prometheus_client")


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages([str(PACKAGE)], "tsg."):
        if found.name != "tsg.__main__":
            yield importlib.import_module(found.name)


def imported(program: str, *arguments: str | Path) -> set[str]:
    """The costly modules that a program has imported by its end."""
    tail = "\nprint(*(name for name in sys.modules), file=sys.stderr)"
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}{tail}", *arguments],
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    loaded = set(ran.stderr.split())
    assert "tsg" in loaded
    return {name for name in COSTLY if name in loaded}


# -- names -----------------------------------------------------------------------------------------------


def test_the_public_names_are_sorted_and_each_is_there_with_a_docstring() -> None:
    assert tsg.__all__ == sorted(set(tsg.__all__))
    for name in tsg.__all__:
        found = getattr(tsg, name)
        assert inspect.getdoc(found), name
        if isinstance(found, type) or inspect.isfunction(found):
            assert found.__doc__, name


def test_the_public_names_are_those_of_the_contract() -> None:
    assert set(tsg.__all__) >= {
        "Base",
        "DeliveryStatus",
        "InvalidInput",
        "Ledger",
        "LedgerError",
        "ReconcilePolicy",
        "SchemaOutdated",
        "SchemaTooNew",
        "StateConflict",
        "Task",
        "TaskEvent",
        "TaskNotFound",
        "TaskRecord",
        "TaskStatus",
        "doctor",
        "downgrade",
        "include_name",
        "payload_fingerprint",
        "reconcile",
        "reconcile_restart",
        "upgrade",
    }


def test_a_star_import_brings_exactly_the_public_names() -> None:
    space: dict[str, Any] = {}
    exec("from tsg import *", space)
    assert set(space) - {"__builtins__"} == set(tsg.__all__)


def test_the_names_shown_to_type_checkers_are_those_that_are_imported() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    shown = [alias for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(alias.asname or alias.name for alias in shown) == tsg.__all__
    assert all(alias.asname == alias.name for alias in shown)


def test_dir_shows_the_public_names_and_an_unknown_one_is_an_attribute_error() -> None:
    assert set(tsg.__all__) <= set(dir(tsg))
    with pytest.raises(AttributeError, match="nonsense"):
        tsg.nonsense  # noqa: B018


def test_every_module_lists_its_public_names_sorted_and_has_them() -> None:
    for module in modules():
        names = getattr(module, "__all__", None)
        assert names is not None, module.__name__
        for name in names:
            assert hasattr(module, name), (module.__name__, name)


def test_the_package_is_typed_and_names_its_version() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert re.fullmatch(r"\d+\.\d+\.\d+", tsg.__version__)


# -- errors ----------------------------------------------------------------------------------------------

TREE: dict[str, tuple[type[Exception], ...]] = {
    "LedgerError": (Exception,),
    "InvalidInput": (errors.LedgerError, ValueError),
    "DependencyCycle": (errors.InvalidInput,),
    "DamagedFile": (errors.InvalidInput,),
    "PlanNotFound": (errors.LedgerError, LookupError),
    "StepNotFound": (errors.LedgerError, LookupError),
    "TaskNotFound": (errors.LedgerError, LookupError),
    "StateConflict": (errors.LedgerError,),
    "SchemaOutdated": (errors.StateConflict,),
    "SchemaTooNew": (errors.StateConflict,),
}


def test_the_errors_are_the_tree_of_the_contract() -> None:
    assert {name: getattr(errors, name).__bases__ for name in errors.__all__} == TREE
    for name in TREE:
        assert getattr(tsg, name) is getattr(errors, name)


def test_the_tree_drawn_in_the_module_is_the_tree_there_is() -> None:
    drawn: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    [│├└─ ]*([A-Z]\w+)( |$)", line)
        if found is None:
            continue
        name, depth = found[1], found.start(1)
        above = [(column, parent) for column, parent in above if column < depth]
        drawn[name] = above[-1][1] if above else None
        above.append((depth, name))
        for base in TREE[name][1:]:
            assert f"({base.__name__})" in line
    assert drawn == {name: None if bases[0] is Exception else bases[0].__name__ for name, bases in TREE.items()}


# -- docstrings ------------------------------------------------------------------------------------------


def documented(module: ModuleType) -> Iterator[tuple[str, object]]:
    """The public functions, classes and methods that are written in a module."""
    for name, found in vars(module).items():
        if name.startswith("_") or getattr(found, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(found):
            yield name, found
        elif isinstance(found, type):
            yield name, found
            for inner, member in vars(found).items():
                member = getattr(member, "__func__", member)
                if inspect.isfunction(member) and not inner.startswith("_") and member.__name__ != "<lambda>":
                    yield f"{name}.{inner}", getattr(found, inner)


def test_every_module_has_a_docstring() -> None:
    for module in (tsg, *modules()):
        assert (module.__doc__ or "").strip(), module.__name__


def test_every_public_function_class_and_method_has_a_docstring() -> None:
    missing = [
        f"{module.__name__}.{name}"
        for module in modules()
        for name, found in documented(module)
        if not (inspect.getdoc(found) or "").strip() or (isinstance(found, type) and not (found.__doc__ or "").strip())
    ]
    assert missing == []


def commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """All commands of a group, and of the groups in it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from commands(command)


def test_every_command_and_option_says_what_it_is_for() -> None:
    found = list(commands(app))
    assert len(found) > len(COMMANDS)
    for name, command in found:
        assert command.name == name
        assert (command.help or "").strip(), name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, (name, parameter.name)


# -- what an import costs --------------------------------------------------------------------------------


def test_importing_the_package_imports_nothing_costly() -> None:
    assert imported("import tsg") == set()


def test_the_ledger_needs_neither_the_orm_nor_alembic_nor_click() -> None:
    assert imported("from tsg import Ledger, ReconcilePolicy, reconcile_restart, doctor, reconcile") == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ("doctor",),
        ("create",),
        ("reconcile",),
        ("reconcile", "--dry-run"),
        ("current",),
        ("check",),
        ("upgrade",),
        ("plan", "list"),
    ],
    ids=" ".join,
)
def test_a_command_on_a_ledger_at_head_imports_neither_the_orm_nor_alembic(
    ledger: tsg.Ledger, path: Path, arguments: tuple[str, ...]
) -> None:
    tsg.Plans(ledger)
    program = (
        "from tsg.cli import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as left:\n    assert not left.code"
    )
    assert imported(program, "--db", path, *arguments) == {"click"}


def test_help_and_a_malformed_call_import_no_sqlalchemy() -> None:
    for arguments in (["--version"], ["nonsense"]):
        program = f"from tsg.cli import main\ntry:\n    main({arguments})\nexcept SystemExit:\n    pass"
        ran = subprocess.run(
            [sys.executable, "-c", f"import sys\n{program}\nsys.exit('sqlalchemy' in sys.modules)"],
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert ran.returncode == 0


def test_importing_the_package_changes_no_logger_and_warns_of_nothing() -> None:
    program = (
        "import logging, sys\nroot = logging.getLogger()\nbefore = (root.level, list(root.handlers))\n"
        "import tsg\n[getattr(tsg, name) for name in tsg.__all__]\n"
        "sys.exit((root.level, list(root.handlers)) != before)"
    )
    ran = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")
