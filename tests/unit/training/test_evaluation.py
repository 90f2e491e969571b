"""Settings beyond training: what is asked for is evaluated once, kept, and refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.config import ModelConfig, Runtime, TrainConfig
from lab.files import RunError
from lab.models.evaluation import evaluate
from lab.training.evaluation import (
    evaluate_settings,
    list_default_settings,
    undo_json,
    vary_settings,
)
from lab.training.experiment import carry_out
from lab.training.run import Run
from tasks import TASKS
from tasks.base import Schedule, Task
from tasks.bounds import TextChangedError
from tasks.copying import Copy
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=64)
TRAIN = TrainConfig(max_steps=2, eval_every=2, batch_size=4, test_rows=8, early_stop=False)
CPU = Runtime(device="cpu")


class Short(nn.Module):
    """A mixer with a table of 16 positions, past which looking up fails."""

    def __init__(self, d_model: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(16, d_model))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[torch.arange(x.shape[1])]


def trained(path: Path, task: Task = TASK, **model: Any) -> Run:
    run = Run(path / "run", task, ModelConfig(**{"stack": "AM", "d_model": 8} | model), TRAIN)
    carry_out(run, CPU)
    return run


def kept(run: Run) -> list[tuple[str, Any]]:
    result = json.loads((run.path / "result.json").read_text())
    return [(entry["option"], undo_json(entry["value"])) for entry in result["evaluations"]]


def test_each_setting_is_evaluated_once_in_order_and_kept(tmp_path):
    run, told = trained(tmp_path), []
    settings = {"seq_len": [32, 16, 32], "n_pairs": [1]}
    found = evaluate_settings(run, settings, "cpu", told.append)
    assert told == ["seq_len=32", "seq_len=16", "n_pairs=1"]
    wanted = [("seq_len", 32), ("seq_len", 16), ("n_pairs", 1)]
    assert [(entry["option"], entry["value"]) for entry in found] == wanted
    assert kept(run) == wanted
    again = evaluate_settings(run, {"n_pairs": [2, 1], "seq_len": [16]}, "cpu", told.append)
    assert told[3:] == ["n_pairs=2"]
    assert [(entry["option"], entry["value"]) for entry in again] == [
        *(("n_pairs", 2), ("n_pairs", 1), ("seq_len", 16)),
    ]
    assert kept(run) == [*wanted, ("n_pairs", 2)]
    own = next(entry for entry in again if entry["option"] == "seq_len")
    assert own["accuracy"] == run.read_metrics().last_test["test_accuracy"]
    expected = evaluate(
        TASK.replace(n_pairs=2), run.load_state("cpu").model, rows=8, rows_at_once=8, seed=0
    )
    assert again[0]["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert (again[0]["rows"], again[0]["scored"]) == (8, 16)


def test_what_was_found_before_more_training_is_dropped(tmp_path):
    run = trained(tmp_path)
    evaluate_settings(run, {"seq_len": [16, 32]}, "cpu")
    result = run.read_result()
    assert result is not None
    old = [entry | {"step": 1, "accuracy": 0.9} for entry in result["evaluations"]]
    run.write_result({**result, "evaluations": old})
    (found,) = evaluate_settings(run, {"seq_len": [32]}, "cpu")
    assert found["step"] == 2
    assert kept(run) == [("seq_len", 32)]


def test_mixtures_are_evaluated_and_known_again(tmp_path):
    run, told = trained(tmp_path), []
    settings = {"seq_len": [(8, 32)], "n_pairs": [(1, 2)]}
    first = evaluate_settings(run, settings, "cpu", told.append)
    assert kept(run) == [("seq_len", (8, 32)), ("n_pairs", (1, 2))]
    assert evaluate_settings(run, settings, "cpu", told.append) == json.loads(json.dumps(first))
    assert told == ["seq_len=(8, 32)", "n_pairs=(1, 2)"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"options": {"A.mask": "soft", "A.max_seq_len": 16}}, "max_seq_len=16"),
        ({"stack": "UM", "model": f"{__name__}:Short"}, "Short: raised IndexError"),
    ],
)
def test_what_the_model_cannot_take_is_kept_as_such(tmp_path, monkeypatch, model, words):
    monkeypatch.setattr("lab.models.architectures.load_class", lambda path: Short)
    run = trained(tmp_path, **model)
    refused, taken = evaluate_settings(run, {"seq_len": [32, 16]}, "cpu")
    assert words in refused["error"]
    assert refused.keys() == {"option", "value", "step", "error"}
    assert "accuracy" in taken
    assert kept(run) == [("seq_len", 32), ("seq_len", 16)]


def test_what_goes_wrong_beside_the_model_is_no_refusal_of_it(tmp_path, monkeypatch):
    run = trained(tmp_path)
    evaluate_settings(run, {"seq_len": [16]}, "cpu")

    def broken(*args: object, **options: object):
        raise ValueError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr("lab.models.evaluation.evaluate", broken)
        with pytest.raises(ValueError, match="a bug"):
            evaluate_settings(run, {"seq_len": [32]}, "cpu")
    monkeypatch.setattr(MQAR, "generate", broken)
    with pytest.raises(ValueError, match="a bug"):
        evaluate_settings(run, {"seq_len": [32]}, "cpu")
    assert kept(run) == [("seq_len", 16)]


def test_a_text_that_changed_is_no_refusal_of_the_model(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 200)
    run = trained(tmp_path, TASKS["bytes"](path=str(text), seq_len=16))

    def change(setting: str) -> None:
        text.write_text("something else " * 300)

    with pytest.raises(TextChangedError, match="has changed"):
        evaluate_settings(run, {"seq_len": [32]}, "cpu", change)
    result = run.read_result()
    assert result is not None
    assert "evaluations" not in result


def test_settings_that_cannot_be_are_named_before_anything_is_evaluated(tmp_path):
    run = Run(tmp_path / "run", TASK, ModelConfig(stack="AM", d_model=8), TRAIN)
    with pytest.raises(ValueError, match="eval vocab_size=128: has 128 tokens, the model 64"):
        evaluate_settings(run, {"vocab_size": [128]})
    with pytest.raises(ValueError, match="seq_len=15: must be even"):
        vary_settings(run, {"seq_len": [16, 15]})
    with pytest.raises(ValueError, match="unknown option 'depth'"):
        vary_settings(run, {"depth": [1]})
    with pytest.raises(RunError, match="has no checkpoint to evaluate"):
        evaluate_settings(run, {"seq_len": [32]})
    run = trained(tmp_path)
    (run.path / "result.json").unlink()
    with pytest.raises(RunError, match="has no result yet"):
        evaluate_settings(run, {"seq_len": [32]})


def test_by_default_the_tasks_own_settings_that_the_options_allow():
    def default(task: Task) -> dict[str, list[Any]]:
        return list_default_settings(Run(Path("nowhere"), task, ModelConfig(), TRAIN))

    assert default(Copy(seq_len=32)) == {"seq_len": [32, 200, 400, 800]}
    # The value trained on comes first and once; what is trained on as a mixture is no one value.
    assert default(Copy(seq_len=400)) == {"seq_len": [400, 200, 800]}
    assert default(Copy(seq_len=(32, 64))) == {"seq_len": [200, 400, 800]}  # type: ignore[arg-type]
    # Strings of up to 400 tokens, none twice, take more tokens than 128.
    assert default(Copy(seq_len=64, repeats=False, vocab_size=128)) == {"seq_len": [64, 200]}
    run = Run(Path("nowhere"), TASK, ModelConfig(), TRAIN)
    assert all(
        vary_settings(run, {name: values}) for name, values in list_default_settings(run).items()
    )
    scheduled = Copy(seq_len=Schedule(16, 32, 8))  # type: ignore[arg-type]
    assert default(scheduled) == {"seq_len": [200, 400, 800]}


def test_what_memory_does_not_hold_is_kept_as_such(tmp_path, monkeypatch):
    run = trained(tmp_path, TASKS["flip_flop"](seq_len=16))

    def full(*args: object, **options: object):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr("lab.models.evaluation.score", full)
    (found,) = evaluate_settings(run, {"seq_len": [2**15]}, "cpu")
    assert "rows of 32,768 tokens: does not fit in memory, of which" in found["error"]
