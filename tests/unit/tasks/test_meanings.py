"""Every shortcut of every task has its meaning in words, and no meaning is left over."""

from tasks import TASKS
from tasks.meanings import MEANINGS


def test_every_shortcut_has_a_meaning():
    names = {name for task in TASKS.values() for name in task().shortcuts()}
    assert names == MEANINGS.keys()
