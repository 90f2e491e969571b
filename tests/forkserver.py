"""A server that has imported the lab once, and forks the processes that tests start.

It has never used Polars, whose threads do not survive a fork. A test process has only one server,
with what it was first told to import: so all tests tell it the same.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

from analysis import ANALYSES

IMPORTED = (
    "analysis.examination",
    *ANALYSES.data.values(),
    "analysis.pages.comparison",
    "lab.api.run",
    "lab.cli.app",
    "lab.huggingface.saving",
    "lab.training.experiment",
)


def connect_server() -> ForkServerContext:
    """Return the context whose processes this server forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context
