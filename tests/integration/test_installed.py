"""The installed command, in a folder whose files have the names of its packages."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from lab import __version__

ROOT = Path(__file__).parents[2]
MIXERS = """
import torch
from torch import nn


class Average(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.value = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        import neighbour

        count = torch.arange(1, x.shape[1] + 1)
        return neighbour.GAIN * self.value(x).cumsum(1) / count[:, None]
"""
PACKAGES = ("lab", "analysis", "tasks")
FILES = ("tasks", "statistics", "queue", "plotly", "torch", "json")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The lab, built as a wheel and installed without what it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "install", *options, "--target", str(folder), str(ROOT)], check=True)
    return folder


def test_the_wheel_has_all_files_of_the_packages_and_no_others(installed):
    def list_files(home: Path) -> set[Path]:
        """Return the files of the packages."""
        return {
            path.relative_to(home)
            for package in PACKAGES
            for path in (home / package).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    assert list_files(installed) == list_files(ROOT)
    assert {Path(package, "py.typed") for package in PACKAGES} < list_files(installed)
    assert Path("analysis/pages/templates/report.html.j2") in list_files(installed)
    info = f"wonderful_lab-{__version__}.dist-info"
    assert {path.name for path in installed.iterdir()} == {*PACKAGES, "bin", info}
    needed = Distribution.at(installed / info).requires or []
    assert not [line for line in needed if line.startswith("hypothesis") and "extra" not in line]


@pytest.fixture
def clashing(tmp_path) -> Path:
    """A user's folder."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the user\\'s folder')")
    for name in FILES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user\\'s file')")
    (tmp_path / "neighbour.py").write_text("GAIN = 1.0")
    (tmp_path / "my_mixers.py").write_text(MIXERS)
    return tmp_path


def run(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the wheel in front of the other packages."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def test_the_source_distribution_has_the_packages_and_no_tests(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(tmp_path / f"wonderful_lab-{__version__}.tar.gz") as archive:
        inside = {Path(name).parts[1] for name in archive.getnames()}
    about = {".gitignore", "CHANGELOG.md", "CITATION.cff", "PKG-INFO", "README.md"}
    assert inside == {*PACKAGES, *about, "pyproject.toml"}


def test_a_users_folder_does_not_change_what_the_command_does(installed, clashing):
    lab = str(installed / "bin" / "lab")
    options = "--seq-len 8 --vocab-size 32 --d-model 8 --batch-size 4 --max-steps 2 --test-rows 4"
    mixer = "my_mixers:Average"
    words = ("mqar", *options.split(), "--model", mixer, "--out", "out", "--json")
    trained = json.loads(run(installed, clashing, lab, *words).stdout)
    assert (trained["model"], trained["steps"]) == (mixer, 2)
    assert (clashing / "out" / "report.html").exists()
    # In other processes, which have to find the user's module too.
    grid = ("--grid", "learning_rate=1e-3", "--seeds", "1", "--out", "grid")
    run(installed, clashing, lab, "sweep", "mqar", *options.split(), "--model", mixer, *grid)
    assert len(list(clashing.glob("grid/*/result.json"))) == 1
    words = ("certify", mixer, "--option", "d_model=8", "--only", "causal", "--json")
    certified = json.loads(run(installed, clashing, lab, *words).stdout)
    assert [law["verdict"] for law in certified["laws"]] == ["holds"]
    # `python -m` itself finds a folder `lab`, and nothing can be done about that.
    shutil.rmtree(clashing / "lab")
    assert "0." in run(installed, clashing, sys.executable, "-m", "lab", "--version").stdout


def test_pytest_in_another_project_tests_the_laws(installed, tmp_path):
    (tmp_path / "my_mixers.py").write_text(MIXERS.replace("neighbour.GAIN", "1.0"))
    (tmp_path / "neighbour.py").touch()
    words = ("--lawful", "my_mixers:Average d_model=8", "-k", "causal", "-p", "no:cacheprovider")
    ran = run(installed, tmp_path, sys.executable, "-m", "pytest", *words, "-v")
    assert "my_mixers:Average d_model=8::causal PASSED" in ran.stdout
    assert "1 passed, 14 deselected" in ran.stdout
