"""`pytest --lawful`: a test for each law, in projects that are not this one."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

MIXERS = """
import torch
from torch import nn


class Average(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.value = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.value(x).cumsum(1)


class Centred(Average):
    def forward(self, x):
        return self.value(x - x.mean(1, keepdim=True))


class Endless(Average):
    def forward(self, x):
        return self.value(x) / 0
"""
GOOD = "their_mixers:Average d_model=8"
LEAKY = "their_mixers:Centred d_model=8"
ENDLESS = "their_mixers:Endless d_model=8"


def run(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    pytester.makepyfile(their_mixers=MIXERS)
    # Under its module's name, whether or not its entry point is installed.
    plugin = ("-p", "no:lawful", "-p", "lab.pytest_plugin", "-p", "no:cacheprovider")
    return pytester.runpytest_inprocess(*plugin, *words)


def test_a_lawful_module_passes_and_a_leaking_one_fails(pytester: pytest.Pytester):
    found = run(pytester, "--lawful", GOOD, "--lawful", LEAKY, "-k", "causal or matrix", "-rs")
    found.assert_outcomes(passed=1, failed=1, skipped=2, deselected=26)
    found.stdout.fnmatch_lines(
        [
            "*their_mixers:Centred: causal*",
            "causal fails: length 2: changing position 1 moves output 0 of row 0",
            "*from their_mixers import Centred as factory*",
            "*not applicable: the module has no matrix*",
        ]
    )
    assert "Traceback" not in found.stdout.str()


def test_modules_named_in_the_projects_settings_are_tested_every_time(pytester: pytest.Pytester):
    pytester.makeini(f"[pytest]\nlawful =\n    {GOOD}\n    {LEAKY}")
    pytester.makepyfile("def test_own():\n    assert True")
    run(pytester, "-k", "batch or own").assert_outcomes(passed=3, deselected=28)


def test_a_law_that_every_module_can_be_tried_on_must_be_decided(pytester: pytest.Pytester):
    found = run(pytester, "--lawful", ENDLESS, "-k", "causal")
    found.assert_outcomes(failed=1, deselected=14)
    found.stdout.fnmatch_lines(["causal is not decided: *is not finite*"])


def test_what_cannot_be_tested_is_said_in_one_line(pytester: pytest.Pytester):
    found = run(pytester, "--lawful", "their_mixers:Missing", "-k", "causal")
    found.assert_outcomes(failed=1, deselected=14)
    found.stdout.fnmatch_lines(["target=their_mixers:Missing: AttributeError: *"])
    refused = run(pytester, "--lawful", "their_mixers:Average d_model")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["*option=d_model: must look like d_model=16"])


def test_it_does_nothing_unless_asked(pytester: pytest.Pytester, tmp_path: Path):
    run(pytester).assert_outcomes()
