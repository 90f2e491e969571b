"""Certifying whole targets: by name, over conditions, with programs that reproduce what fails."""

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lab.laws import (
    CONDITIONS,
    LAWS,
    QUICK,
    Certification,
    CertifySettings,
    assert_lawful,
    certify,
)

# What the tests load by name, and the printed programs import without this project.
TARGETS = '''
import torch
from torch import nn


class Peek(nn.Module):
    """Each output has a little of the next input, behind a gate that begins shut."""

    def __init__(self, width=8):
        super().__init__()
        self.mix, self.gate = nn.Linear(width, width), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        y = self.mix(x)
        return y + self.gate * y.roll(-1, 1)


class Rows(nn.Module):
    """Nine rows, of which a modulo skips two; and a sum without forgetting, in bf16."""

    def __init__(self):
        super().__init__()
        self.rows, self.spare = nn.Parameter(torch.randn(9, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        chosen = self.rows[(x[..., 0].abs() * 3).long() % 7]
        single = x.dtype == torch.float32
        return ((x.abs().bfloat16() if single else x.abs()).to(x.dtype) + chosen).cumsum(1)


class Words(nn.Module):
    """Tokens whose batch is mixed, and noise."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        y = self.table(tokens)
        return self.head(y - y.mean(0) + 1e-9 * torch.randn(()))


def four_at_a_time(x):
    if x.shape[2] != 6 or x.shape[1] % 4:
        raise ValueError("width must be 6, length must be divisible by 4")
    return x.cumsum(1)


def needs(a, b):
    return nn.Linear(a, b)


def broken():
    raise OSError("no weights here")
'''

SMALL = CertifySettings(max_len=512, rounding_len=64, seconds=60.0)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("certified")
    (folder / "lab_targets.py").write_text(TARGETS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("lab_targets", None)


@pytest.mark.parametrize(
    ("name", "laws"),
    [
        ("Peek", {"causal"}),
        ("Rows", {"gradient reach", "table reach", "precision", "stable"}),
        ("Words", {"deterministic", "batch-invariant"}),
    ],
)
def test_each_failure_is_shown_by_a_program_of_its_own(folder: Path, name: str, laws: set[str]):
    certification = Certification(f"lab_targets:{name}", replace(SMALL, lengths=(1, 2, 5)))
    failures = [v for v in certification if v.verdict == "fails"]
    assert {v.law for v in failures} == laws
    for failure in failures:
        assert failure.snippet is not None
        assert "lab." not in failure.snippet.replace("lab_targets", "")
        program = folder / "program.py"
        program.write_text(failure.snippet)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(program))
        assert ended.value.code


def test_a_program_runs_without_this_project(folder: Path):
    certification = Certification("lab_targets:Words", replace(SMALL, lengths=(2,)))
    program = certification.judge("batch-invariant").snippet
    assert program is not None
    # An isolated interpreter knows neither this folder nor the program's.
    told = f"import sys; sys.path.insert(0, {str(folder)!r}); exec(sys.stdin.read())"
    command = [sys.executable, "-I", "-W", "error", "-c"]
    given = {"input": program, "cwd": "/", "capture_output": True, "text": True}
    ran = subprocess.run([*command, told], **given)
    assert ran.returncode == 1, ran.stderr
    assert "batch" in ran.stdout or "row" in ran.stdout
    # What cannot be imported shows no failure.
    lost = subprocess.run([*command, "import sys; exec(sys.stdin.read())"], **given)
    assert lost.returncode == 2
    assert "No module named 'lab_targets'" in lost.stderr


def test_what_weights_hide_is_found_in_another_condition():
    (found,) = (v for v in certify("lab_targets:Peek", lengths=(3,)) if v.law == "causal")
    assert found.verdict == "fails"
    assert found.counterexample == (
        "length 2: changing position 1 moves output 0 of row 0 (seed 1, weights moved, evaluating)"
    )
    alone = certify("lab_targets:Peek", lengths=(3,), conditions=CONDITIONS[:1])
    assert next(v for v in alone if v.law == "causal").verdict == "holds"


def test_the_same_is_found_twice():
    first, second = (Certification("lab_targets:Peek", replace(SMALL, lengths=(5,))) for _ in "ab")
    for law in ("causal", "precision", "gradient reach"):
        assert first.judge(law) == second.judge(law)


def test_lengths_that_are_refused_are_named_and_left_out():
    certification = Certification(
        "lab_targets:four_at_a_time", replace(SMALL, d_model=6, lengths=(3, 4, 7, 8))
    )
    refused = (
        "refuses lengths 3, 7: raised ValueError: width must be 6, length must be divisible by 4"
    )
    assert certification.notes[-1] == refused
    assert "lengths 4, 8 in float64" in certification.judge("batch-invariant").evidence


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("lab_targets", "target=lab_targets: must look like package.module:factory"),
        ("lab_targets:Absent", "target=lab_targets:Absent: AttributeError"),
        ("lab_targets:packages__", "has no attribute 'packages__'$"),
        ("no_such_module:f", "target=no_such_module:f: ModuleNotFoundError"),
        ("lab_target:f", r"No module named 'lab_target'\. Did you mean lab_targets"),
        ("torch.nnn:GRU", r"No module named 'torch\.nnn'\. Did you mean torch\.nn"),
        ("lab_targets:needs", "needs needs a, b: give --option a=… --option b=…"),
        ("lab_targets:broken", "broken raised OSError: no weights here"),
    ],
)
def test_what_cannot_be_made_is_said(target: str, words: str):
    with pytest.raises(ValueError, match=words):
        Certification(target)


def test_parameters_have_their_own_names():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.spare = nn.Embedding(9, 8), nn.Linear(8, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            y = self.table(tokens)
            self.spare(y)
            return y

    found = Certification(Unused(), replace(SMALL, lengths=(3,))).judge("gradient reach")
    names = [words.partition(":")[0] for words in (found.counterexample or "").split("; ")]
    assert names == ["spare.weight", "spare.bias"]


def test_options_go_to_the_factory():
    options = {"input_size": 6, "hidden_size": 5}
    certification = Certification("torch.nn:GRU", CertifySettings(options=options))
    assert certification.judge("prefill = step").verdict == "holds"
    with pytest.raises(ValueError, match=r"GRU raised TypeError: .*argument 'width'"):
        Certification("torch.nn:GRU", CertifySettings(options={**options, "width": 1}))


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x).mean(1, keepdim=True).expand_as(x)


def test_lawful_modules_pass_in_other_projects_tests():
    assert_lawful(nn.GRU(8, 8, batch_first=True), laws=["causal", "prefill = step"])
    assert_lawful(nn.Linear(8, 8), lengths=(1, 3))


def test_unlawful_ones_say_why():
    with pytest.raises(AssertionError) as raised:
        assert_lawful(Mean(), 8, laws=["deterministic", "causal"])
    words = str(raised.value)
    assert words.startswith("causal fails: length 2: changing position 1 moves output 0 of row 0\n")
    assert "module = ...  # the module that was certified" in words


def test_laws_that_are_asked_for_must_be_decided():
    with pytest.raises(AssertionError, match="padding not applicable: the module takes no mask"):
        assert_lawful(nn.Linear(8, 8), laws=["padding"])
    with pytest.raises(ValueError, match=r"laws='causality': must be one of deterministic, causal"):
        assert_lawful(nn.Linear(8, 8), laws=["causality"])


def test_only_the_laws_asked_for_are_tried():
    found = certify(nn.Linear(8, 8), d_model=8, lengths=(1, 2), only=["causal", "deterministic"])
    assert [verdict.law for verdict in found] == ["deterministic", "causal"]
    with pytest.raises(ValueError, match=r"only='causality': must be one of deterministic, causal"):
        certify(nn.Linear(8, 8), d_model=8, only=["causality"])
    with pytest.raises(ValueError, match=r"only='causal': must be a list of one or more laws"):
        certify(nn.Linear(8, 8), d_model=8, only="causal")


def test_training_mode_is_left_out_of_a_quick_certificate():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.mT).mT

    quick, usual = (
        Certification(Averaging(), replace(settings, lengths=(2, 5))).judge("batch-invariant")
        for settings in (QUICK, CertifySettings())
    )
    assert (quick.verdict, usual.verdict) == ("holds", "fails")
    assert "training" in (usual.counterexample or "")


def test_long_lengths_alone_are_tried_under_every_condition():
    found = Certification(nn.Linear(8, 8), replace(SMALL, d_model=8, lengths=(200,))).judge(
        "causal"
    )
    assert found.verdict == "holds"
    assert found.evidence.endswith("lengths 200 in float64; the worst of 4 conditions")


def test_a_law_that_is_decided_in_one_condition_says_so():
    class Unmoved(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            if self.shift.any():
                raise RuntimeError("shift must be 0")
            return x + self.shift

    found = Certification(Unmoved(), replace(QUICK, d_model=8, lengths=(5,))).judge("causal")
    assert found.verdict == "holds"
    assert "lengths 5 in float64; in one condition; not decided with seed 1" in found.evidence


def test_a_module_that_comes_evaluating_is_tried_so():
    trained = Certification(nn.Dropout(0.5), replace(QUICK, d_model=8))
    assert [c.training for c in trained.conditions] == [False, False]
    assert len(Certification(nn.Dropout(0.5), CertifySettings(8)).conditions) == 4
    assert len(Certification(nn.Dropout(0.5).eval(), CertifySettings(8)).conditions) == 3


def test_a_law_that_raises_is_not_decided():
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] != 3:
                raise RuntimeError("three rows\nand no others")
            return x

    with pytest.raises(ValueError, match="three rows"):
        Certification(Alone(), CertifySettings(8, batch=2))


def test_a_misspelt_setting_is_refused():
    with pytest.raises(TypeError, match="max_length"):
        certify(nn.Linear(8, 8), d_model=8, max_length=3)


def test_every_law_has_numbers():
    for verdict in certify(nn.GRU(8, 8, batch_first=True), lengths=(1, 5), max_len=512):
        if verdict.verdict == "holds":
            assert verdict.measured is not None, verdict
            assert verdict.allowed is not None, verdict
    assert set(LAWS) == {v.law for v in certify(torch.tanh, d_model=8, lengths=(1, 2), max_len=512)}


GRU = {"input_size": 8, "hidden_size": 8, "batch_first": True}


def test_laws_are_judged_without_cudnn():
    seen = set()

    def watch(x):
        seen.add(torch.backends.cudnn.enabled)
        return 2 * x

    certification = Certification(watch, CertifySettings(d_model=8))
    seen.clear()
    certification.judge("causal")
    assert torch.backends.cudnn.enabled
    assert seen == {False}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_program_for_a_gpu_switches_cudnn_off(device):
    certification = Certification("torch.nn:GRU", CertifySettings(options=GRU))
    certification.device = torch.device(device)
    condition, adapted = certification.conditions[0], certification._first
    recipe = certification._describe_origin(adapted, condition, torch.float32, False).recipe
    assert ("torch.backends.cudnn.enabled = False" in recipe) == (device == "cuda")


@pytest.mark.gpu
def test_on_a_gpu_a_recurrence_of_torch_is_lawful():
    laws = ["causal", "gradient reach", "gradient is the derivative", "precision"]
    found = certify(nn.GRU(16, 16, batch_first=True), d_model=16, only=laws, device="cuda")
    assert {verdict.law: verdict.verdict for verdict in found} == dict.fromkeys(laws, "holds")
