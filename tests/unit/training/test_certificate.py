"""Layers are certified before a run trains: a leak stops it, and what was found is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analysis.pages.report import write_quick
from lab.config import ModelConfig, Runtime, TrainConfig
from lab.training.certificate import UnlawfulError, describe_certificate, read_certificate
from lab.training.experiment import carry_out
from lab.training.run import Run
from tasks.mqar import MQAR

HERE = "tests.unit.training.test_certificate"
TASK = MQAR(seq_len=64, vocab_size=80)
TRAIN = TrainConfig(max_steps=2, eval_every=2, batch_size=2, test_rows=4, early_stop=False)


class Causal(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.value(x)).cumsum(1)


class Centred(Causal):
    """Subtracts the mean over all positions, later ones too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x - x.mean(1, keepdim=True))


class Normed(Causal):
    """Mixes rows and positions in training only."""

    def __init__(self, d_model: int):
        super().__init__(d_model)
        self.norm = nn.BatchNorm1d(d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.value(x).transpose(1, 2)).transpose(1, 2)


class LateLeak(Causal):
    """Leaks at 64 tokens, the length of the run's rows, and at no length below."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.value(x)
        return y + y.roll(-1, 1) if x.shape[1] == 64 else y


class Deaf(Causal):
    """Has a parameter that reaches no output."""

    def __init__(self, d_model: int):
        super().__init__(d_model)
        self.unused = nn.Parameter(torch.ones(d_model))


class Forgetful(Causal):
    """Forgets its last projection."""

    def __init__(self, d_model: int):
        super().__init__(d_model)
        self.out = nn.Linear(d_model, d_model, bias=False)


def plan(path: Path, mixer: type[nn.Module] | None, stack: str = "UN") -> Run:
    model = None if mixer is None else f"{HERE}:{mixer.__name__}"
    return Run(path / "run", TASK, ModelConfig(stack=stack, d_model=8, model=model), TRAIN)


def train(run: Run, **runtime: Any) -> str:
    plans: list[Any] = []
    carry_out(run, Runtime(device="cpu", threads=1, **runtime), plans.append)
    return plans[0].certified


@pytest.mark.parametrize(
    ("mixer", "law", "words"),
    [
        (Forgetful, "gradient reach", "out.weight: none, never used"),
        (Centred, "causal", "length 2: changing position 1 moves output 0"),
        (Normed, "causal", "training"),
        (LateLeak, "causal", "length 64: "),
        (Deaf, "gradient reach", "unused"),
    ],
)
def test_a_run_with_an_unlawful_layer_does_not_train(
    tmp_path: Path, mixer: type[nn.Module], law: str, words: str
):
    run = plan(tmp_path, mixer)
    with pytest.raises(UnlawfulError) as caught:
        train(run)
    message = str(caught.value)
    assert message.startswith(f"{mixer.__name__} breaks the law “{law}”")
    assert words in message
    assert message.endswith("--no-certify trains it nevertheless")
    assert not run.list_checkpoints()
    assert not run.read_metrics()


def test_it_trains_if_told_to_and_the_report_says_what_is_wrong(tmp_path: Path):
    run = plan(tmp_path, Centred)
    with pytest.raises(UnlawfulError):
        train(run)
    assert train(run, certify=False) == ""
    page = write_quick(run).page.read_text()
    assert "Certified before training: Centred breaks the law “causal”" in page


def test_a_lawful_mixer_is_certified_once_and_trains_as_it_would_without(tmp_path: Path):
    certified, plain = plan(tmp_path / "a", Causal, "UN*2"), plan(tmp_path / "b", Causal, "UN*2")
    words = train(certified)
    assert words.startswith("Causal obeys deterministic, causal (up to 64 tokens), batch-invariant")
    assert train(plain, certify=False) == ""
    assert read_certificate(plain.path) is None
    assert [layer["blocks"] for layer in (read_certificate(certified.path) or {})["layers"]] == [
        [0, 1]
    ]
    last = [[row["loss"] for row in run.read_metrics()] for run in (certified, plain)]
    assert last[0] == last[1]


def test_the_labs_own_layers_are_certified_if_asked_for(tmp_path: Path):
    assert train(plan(tmp_path / "a", None, "AM")) == ""
    run = plan(tmp_path / "b", None, "AM")
    words = train(run, certify=True)
    assert [part.split()[0] for part in words.split("; ")] == ["Attention", "MLP"]
    certificate = json.loads((run.path / "certificate.json").read_text())
    outcomes = {law["verdict"] for layer in certificate["layers"] for law in layer["laws"]}
    assert outcomes == {"holds"}


def test_what_could_not_be_decided_is_said():
    left = [{"law": "causal", "verdict": "not decided", "tokens": 0}]
    none = {"layers": [{"layer": "Mix", "laws": [], "note": "it takes no input"}]}
    assert describe_certificate(none) == "Mix: no law was decided (it takes no input)"
    held = {"law": "deterministic", "verdict": "holds", "tokens": 7}
    some = {"layers": [{"layer": "Mix", "laws": [held, *left]}]}
    assert describe_certificate(some) == "Mix obeys deterministic; not decided: causal"
    assert describe_certificate({"layers": []}) == "no layer was certified"
