"""The units for bare metal, by systemd's own check, and that they start what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvferry.config import load_config
from tests.support.command_lines import check_kvferry_command
from tests.support.ray_command_line import check_ray_command

FOLDER = Path(__file__).parents[3] / "deploy" / "systemd"
UNITS = sorted(file.name for file in FOLDER.glob("*.service"))
_SYSTEM = Path("/usr/lib/systemd/system")
_EXPOSURE_MAX = 2.5
"""Of 10, by systemd's own count."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed"
)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file system with systemd's own targets and what our units start."""
    machine = tmp_path_factory.mktemp("machine")
    programs = machine / "opt" / "kvferry" / "bin"
    programs.mkdir(parents=True)
    for name in ("ray", "kvferry"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    targets = machine / "usr" / "lib" / "systemd" / "system"
    targets.mkdir(parents=True)
    for file in (*_SYSTEM.glob("*.target"), *_SYSTEM.glob("*.slice")):
        shutil.copy(file, targets, follow_symlinks=False)
    (machine / "etc" / "systemd" / "system").mkdir(parents=True)
    return machine


@pytest.fixture
def root(machine: Path) -> Path:
    """The same with our units, as they are in deploy/."""
    for unit in UNITS:
        shutil.copy(FOLDER / unit, machine / "etc" / "systemd" / "system")
    return machine


def _verify(root: Path) -> list[str]:
    """What systemd finds; it tells of unknown settings and has exit code 0."""
    command = ["systemd-analyze", "verify", f"--root={root}", "--man=no", *UNITS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = done.stderr.splitlines()
    return [line for line in lines if any(unit in line for unit in UNITS)] + (
        [f"exit code {done.returncode}"] if done.returncode else []
    )


@needs_systemd
def test_systemd_takes_every_unit(root: Path) -> None:
    assert len(UNITS) == 3
    assert _verify(root) == []


@needs_systemd
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("ProtectHome=yes", "ProtectHom=yes"),
        ("Restart=on-failure", "Restart=sometimes"),
        ("/opt/kvferry/bin/kvferry up", "/opt/kvferry/bin/kvferri up"),
        ("RestrictAddressFamilies=AF_UNIX", "RestrictAddressFamilies=AF_UNIQUE"),
    ],
)
def test_the_check_finds(root: Path, right: str, wrong: str) -> None:
    unit = root / "etc" / "systemd" / "system" / "kvferry.service"
    text = unit.read_text()
    assert right in text
    unit.write_text(text.replace(right, wrong))
    assert _verify(root)


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_units_give_away_little(root: Path, unit: str) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", f"--root={root}", "--no-pager", unit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert level is not None
    assert float(level[1]) <= _EXPOSURE_MAX


def _commands(unit: str) -> list[str]:
    text = (FOLDER / unit).read_text().replace("\\\n", " ")
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith("Exec")]


def _variables() -> dict[str, str]:
    lines = (FOLDER / "ray.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("unit", UNITS)
def test_what_units_start_is_a_command(unit: str) -> None:
    commands = _commands(unit)
    assert commands
    for command in commands:
        line = re.sub(r"\$\{(\w+)\}", lambda found: _variables()[found[1]], command)
        if line.split("/")[4].startswith("ray"):
            assert check_ray_command(line) == "start"
        else:
            check_kvferry_command(line)


def test_the_configuration_loads_beside_the_variables() -> None:
    config = load_config(FOLDER / "cluster.yaml", _variables(), {})
    assert config.router.replicas == 2
