"""What is shipped: a wheel and an sdist, built as anybody would build them."""

from __future__ import annotations

import ast
import email
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

import tsg as package
from tests.conftest import tsg
from tsg import schema

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


class Shipped(NamedTuple):
    """What was built, and the wheel unpacked as pip installs it."""

    sdist: Path
    wheel: Path
    direct_wheel: Path
    installed: Path


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(command, capture_output=True, check=False, text=True, timeout=300, **options)  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


def tracked(folder: str, names: list[str]) -> set[str]:
    """What a copy of the checkout leaves out."""
    unwanted = {".git", "build", "dist", "__pycache__"}
    return {name for name in names if name in unwanted or name.startswith(".venv") or name.endswith("_cache")}


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    """A wheel by way of an sdist, one straight from the checkout, and the first one installed."""
    folder = tmp_path_factory.mktemp("package")
    checkout, tools = folder / "checkout", folder / "tools"
    shutil.copytree(ROOT, checkout, ignore=tracked)
    run(*PIP, "install", "--target", tools, "build", "hatchling")
    environment = {**os.environ, "PYTHONPATH": str(tools)}
    builder = [sys.executable, "-W", "error", "-m", "build", "--no-isolation"]
    run(*builder, "--outdir", folder / "dist", checkout, env=environment)
    run(*builder, "--wheel", "--outdir", folder / "direct", checkout, env=environment)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (direct,) = (folder / "direct").glob("*.whl")
    installed = folder / "installed"
    run(*PIP, "install", "--no-deps", "--no-compile", "--target", installed, wheel)
    return Shipped(sdist, wheel, direct, installed)


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def installed_python(shipped: Shipped, program: str, cwd: Path) -> str:
    return run(
        sys.executable, "-W", "error", "-c", program, cwd=cwd, env={**os.environ, "PYTHONPATH": str(shipped.installed)}
    ).stdout.strip()


def test_the_wheel_holds_the_package_its_migrations_and_nothing_else(shipped: Shipped) -> None:
    found = names(shipped.wheel)
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tsg").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    scripts = {
        f"tsg/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "migrations").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {"tsg/migrations/env.py", "tsg/py.typed"} < scripts | sources
    assert len([name for name in scripts if "/versions/" in name]) >= len(schema.REVISIONS)
    metadata = {name for name in found if PurePosixPath(name).parts[0].endswith(".dist-info")}
    assert found - metadata == sources | scripts | {"tsg/alembic.ini"}
    assert {PurePosixPath(name).parts[0] for name in metadata} == {f"tsg_ledger-{package.__version__}.dist-info"}


def test_what_is_in_the_wheel_is_what_is_in_the_checkout(shipped: Shipped) -> None:
    with zipfile.ZipFile(shipped.wheel) as archive:
        for name in archive.namelist():
            if name.startswith(("tsg/migrations/", "tsg/alembic.ini")):
                assert archive.read(name) == (ROOT / name.removeprefix("tsg/")).read_bytes()
            elif name.startswith("tsg/"):
                assert archive.read(name) == (ROOT / name).read_bytes()


def test_the_metadata_is_that_of_the_project(shipped: Shipped) -> None:
    with zipfile.ZipFile(shipped.wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        (entries,) = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        assert "tsg = tsg.cli:main" in archive.read(entries).decode()
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    assert metadata["Name"] == PROJECT["name"]
    assert metadata["Version"] == package.__version__
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["License-Expression"] == "Apache-2.0"
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in needed) == ["alembic", "click", "sqlalchemy"]


def test_the_wheel_from_the_sdist_has_the_names_of_the_one_from_the_checkout(shipped: Shipped) -> None:
    assert names(shipped.wheel) == names(shipped.direct_wheel)


def test_the_sdist_holds_what_a_packager_needs(shipped: Shipped) -> None:
    with tarfile.open(shipped.sdist) as archive:
        found = {PurePosixPath(*PurePosixPath(name).parts[1:]).as_posix() for name in archive.getnames()}
    assert found >= {
        "LICENSE",
        "Makefile",
        "README.md",
        "alembic.ini",
        "hatch_build.py",
        "migrations/env.py",
        "pyproject.toml",
        "tests/conftest.py",
        "tests/data/legacy/v1.sqlite",
        "tests/data/revisions/0001.sqlite",
        "tsg/py.typed",
    }
    assert not [name for name in found if "__pycache__" in name or name.startswith((".venv", ".git/", "dist"))]


def test_an_installed_package_finds_its_migrations_inside_itself(shipped: Shipped, tmp_path: Path) -> None:
    folder = installed_python(shipped, "from tsg import schema; print(schema.migrations_folder())", tmp_path)
    assert Path(folder) == (shipped.installed / "tsg" / "migrations").resolve()


def test_an_installed_package_makes_upgrades_and_adopts_ledgers(shipped: Shipped, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name in ("legacy/v1", "legacy/v2", "revisions/0001", "revisions/0002"):
        path = tmp_path / f"{name.replace('/', '-')}.sqlite"
        shutil.copyfile(ROOT / "tests" / "data" / f"{name}.sqlite", path)
        path.chmod(0o600)
    program = """
import sys
from pathlib import Path
from tsg import Ledger
for path in [*sorted(Path.cwd().glob("*.sqlite")), Path("new.sqlite")]:
    with Ledger(path, adopt=True) as ledger:
        ledger.create_task()
        print(path.name, ledger.doctor()["healthy"])
"""
    lines = installed_python(shipped, program, tmp_path).splitlines()
    assert len(lines) == 5
    assert all(line.endswith(" True") for line in lines)


def test_the_demonstration_runs_from_the_wheel(shipped: Shipped, tmp_path: Path) -> None:
    ran = run(
        sys.executable,
        "-m",
        "tsg",
        "demo",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(shipped.installed)},
    )
    assert '"healthy":true' in ran.stdout
    assert ran.stderr == ""


def test_alembic_works_with_the_ini_that_the_wheel_brings_along(shipped: Shipped, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environment = {**os.environ, "PYTHONPATH": str(shipped.installed)}
    ini = shipped.installed / "tsg" / "alembic.ini"
    for arguments in (("upgrade", "head"), ("check",)):
        run(
            sys.executable,
            "-m",
            "alembic",
            "-c",
            ini,
            "-x",
            f"db={tmp_path / 'ledger.sqlite'}",
            *arguments,
            cwd=tmp_path,
            env=environment,
        )
    assert tsg("--db", tmp_path / "ledger.sqlite", "check").returncode == 0


def test_an_editable_install_finds_the_migrations_of_the_checkout() -> None:
    assert schema.migrations_folder() == ROOT / "migrations"
    assert not (ROOT / "tsg" / "migrations").exists()


def test_the_modules_import_only_what_the_project_depends_on() -> None:
    needed = {"sqlalchemy", "alembic", "click", "tsg"}
    # Of an extra, in the one module that it is for.
    extras = {"tsg/mcp.py": {"mcp", "anyio", "pydantic", "pydantic_core"}, "tsg/cli/table.py": {"rich"}}
    extras |= {"tsg/cockpit/render.py": {"jinja2", "markupsafe"}, "tsg/cockpit/server.py": {"starlette", "uvicorn"}}
    for path in (ROOT / "tsg").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found = {(node.module or "").split(".")[0]}
            else:
                continue
            more = extras.get(path.relative_to(ROOT).as_posix(), set())
            assert found <= needed | more | sys.stdlib_module_names, (path.name, found)
