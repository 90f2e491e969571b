"""The tasks are a package of their own: on torch and numpy, without the lab."""

import ast
import subprocess
import sys
from pathlib import Path

import tasks

ALLOWED = {"torch", "numpy", "jaxtyping", "tasks"}

ALONE = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"lab", "analysis", "polars", "typer", "rich", "plotly"}:
            raise ImportError(f"{name} is not there")


sys.meta_path.insert(0, Blocked())
from tasks import TASKS
from tasks.dataset import Rows

for name, kind in TASKS.items():
    task = kind(**kind.presets["small"].options)
    batch = task.batch(split="test", size=2)
    assert task.oracle(batch).shape == batch.targets.shape
    dict(batch.links)
    for rule in task.shortcuts().values():
        rule(batch)
    (rows,) = Rows(task, split="test", batch_size=2, stop=2)
    assert rows["inputs"].equal(batch.inputs), name
print(*TASKS)
"""


def test_every_task_makes_rows_without_the_lab():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(tasks.TASKS)


def test_tasks_import_torch_numpy_and_the_standard_library_alone():
    assert tasks.__file__
    files = list(Path(tasks.__file__).parent.rglob("*.py"))
    assert len(files) > len(tasks.TASKS)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, file
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                assert top in ALLOWED or top in sys.stdlib_module_names, f"{file.name}: {name}"
