"""Analyses, evaluation, training and the capacity curve of other libraries' models and mixers."""

from typing import Any

import pytest
import torch

from analysis.base import Subject
from analysis.capacity import measure_capacity
from analysis.examination import examine, record
from lab.config import TrainConfig
from lab.foreign import mixers, open_model
from lab.foreign.mixer import ForeignMixer
from lab.layers.mixer import MatrixMixer
from lab.models import Block, build
from lab.models.evaluation import evaluate
from lab.peers import load
from tasks import TASKS
from tests.parity.opened import CONFIGS, difference

MQAR = TASKS["mqar"](seq_len=16, n_pairs=3, vocab_size=32)
APPLY = ("rows", "positions", "mechanism", "recall", "errors", "matrices", "heads", "rollout")


def opened(name: str = "llama") -> Any:
    """Return a model in fp32 with its library's own initial weights."""
    word, sizes = CONFIGS[name]
    of = load("transformers")
    torch.manual_seed(0)
    model = of.AutoModelForCausalLM.from_config(getattr(of, f"{word}Config")(**sizes))
    return open_model("hf", model.eval())


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mamba", "mamba2"])
def test_analyses_apply_or_say_why_not(name: str):
    subject = Subject(MQAR, opened(name), MQAR.batch(split="test", size=6))
    found = examine(subject)
    assert set(APPLY) <= set(found.results)
    assert all(len(reason) > 10 for reason in found.not_applicable.values())
    assert {"experts", "dynamic_mask", "value_usage"} <= set(found.not_applicable)
    matrices = record(found)["analyses"]["matrices"]
    assert any("Foreign" in finding["title"] for finding in matrices)


def test_evaluation_counts_right_answers():
    model = opened()
    found = evaluate(MQAR, model, rows=8, rows_at_once=4, seed=0)
    batch = MQAR.batch(split="test", size=8)
    asked = batch.targets >= 0
    with torch.no_grad():
        right = (model(batch.inputs).argmax(-1) == batch.targets)[asked]
    assert found.accuracy == right.double().mean().item()
    wide = TASKS["mqar"](seq_len=16, vocab_size=64)
    for call in (
        lambda: evaluate(wide, model, rows=8, rows_at_once=4, seed=0),
        lambda: Subject(wide, model, wide.batch(size=1)),
    ):
        with pytest.raises(ValueError, match="vocab_size=64 of the task must be ≤ 40"):
            call()


def test_the_capacity_curve_trains_a_model_for_each_number_of_pairs():
    config = TrainConfig(max_steps=3, batch_size=8, test_rows=16, warmup_steps=0)
    tasks = [MQAR.replace(n_pairs=k) for k in (4, 2)]
    found = measure_capacity(lambda: opened("mamba"), tasks, config)
    assert found.pairs.tolist() == [2, 4]
    assert found.steps.tolist() == [3, 3]
    assert (
        (found.accuracy >= found.interval[:, 0]) & (found.accuracy <= found.interval[:, 1])
    ).all()
    assert found.says == "Not learned to 99.0 % even at K = 2."
    figure: Any = found.figure()
    assert list(figure.data[0].y) == found.accuracy.tolist()
    with pytest.raises(ValueError, match="its rows store no pairs"):
        measure_capacity(opened, [TASKS["word_problem"](seq_len=16)], config)
    with pytest.raises(ValueError, match="tasks is empty"):
        measure_capacity(opened, [])


@pytest.mark.parametrize(
    ("name", "options"), [("Llama", {"n_kv_heads": 1}), ("Mamba", {"d_state": 4}), ("Mamba2", {})]
)
def test_another_librarys_mixer_in_a_stack(name: str, options: dict[str, int]):
    model = build(
        "UM UN",
        vocab_size=32,
        d_model=16,
        n_heads=2,
        model=f"lab.foreign.mixers:{name}",
        options={f"U.{option}": value for option, value in options.items()},
    ).eval()
    block = model.blocks[0]
    assert isinstance(block, Block)
    mixer = block.mixer
    assert isinstance(mixer, ForeignMixer)
    assert isinstance(mixer, MatrixMixer)
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert difference(mixer.project(x, mixer.matrix(x) @ mixer.values(x)), mixer(x)) < 1e-5
        later = x.clone()
        later[:, 5:] += 1
        assert torch.allclose(mixer(later)[:, :5], mixer(x)[:, :5], atol=1e-6)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    assert all(p.grad is not None for p in mixer.parameters())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mixers.Llama(6, 2), "d_model=6 must be a positive multiple"),
        (lambda: mixers.Llama(8, 2, n_kv_heads=3), "n_kv_heads=3 must divide"),
        (lambda: mixers.Mamba(8, d_state=0), "d_state=0 must be at least 1"),
        (lambda: mixers.Mamba2(8, 3), "n_heads=3 must divide"),
    ],
)
def test_sizes_of_another_librarys_mixer(make: Any, words: str):
    with pytest.raises(ValueError, match=words):
        make()
