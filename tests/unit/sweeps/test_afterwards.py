"""A process that is killed still has its last line said, and its folder removed."""

import subprocess
import sys
import time

import pytest

PROGRAM = """
import os, pathlib, signal, sys
from lab.sweeps.afterwards import remove_if_killed, say_if_killed
def find_children():
    return pathlib.Path(f"/proc/self/task/{{os.getpid()}}/children").read_text()
folder = pathlib.Path(sys.argv[1])
with say_if_killed("the cluster is gone"), remove_if_killed(folder):
    {end}
"""


@pytest.mark.parametrize(
    ("end", "killed"),
    [
        ("os._exit(1)", True),
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
        ("assert not find_children(); os._exit(1)", True),  # Ray would kill them before
        ("pass", False),
        ("sys.exit('an error of its own')", False),
    ],
)
def test_what_is_left_to_do_is_done_only_where_the_process_was_ended(end, killed, tmp_path):
    folder = tmp_path / "cells"
    (folder / "run").mkdir(parents=True)
    program = PROGRAM.format(end=end)
    ended = subprocess.run(
        [sys.executable, "-c", program, folder], stderr=subprocess.PIPE, text=True
    )
    assert ("the cluster is gone\n" in ended.stderr) == killed
    for _ in range(100 if killed else 1):
        if not folder.exists():
            break
        time.sleep(0.1)
    assert folder.exists() != killed
