"""The training loop's parts: schedule, optimisers, scored positions, evaluation, divergence."""

import math
from dataclasses import replace

import pytest
import torch

from lab.config import ModelConfig, TrainConfig
from lab.models import build
from lab.models.evaluation import Evaluation
from lab.ops.cross_entropy import linear_cross_entropy
from lab.training.checkpoint import save_checkpoint
from lab.training.loop import (
    Annealing,
    DivergedError,
    compute_learning_rate,
    differentiate,
    fit,
    start,
)
from lab.training.run import Run
from tasks.mqar import MQAR

TASK = MQAR(seq_len=16, vocab_size=64)


def model(**options):
    return build("AM", vocab_size=64, d_model=16, **options)


def test_the_schedule():
    config = TrainConfig(learning_rate=1.0, warmup_steps=10, max_steps=110, schedule="cosine")
    assert compute_learning_rate(config, 1) == 0.1
    assert compute_learning_rate(config, 10) == 1.0
    assert compute_learning_rate(config, 60) == pytest.approx(0.55)
    assert compute_learning_rate(config, 110) == pytest.approx(0.1)
    error = TrainConfig(learning_rate=1.0, warmup_steps=10, schedule="error")
    assert compute_learning_rate(error, 11, 0.5) == 0.5
    assert compute_learning_rate(error, 1, 0.5) == 0.1
    constant = TrainConfig(learning_rate=1.0, warmup_steps=0)
    assert compute_learning_rate(constant, 1) == compute_learning_rate(constant, 10**6) == 1.0


def test_every_trained_parameter_has_one_optimizer():
    language_model = build("AE SM", vocab_size=64, d_model=16, options={"E.n_experts": 16})
    state = start(language_model, TrainConfig(weight_decay=0.1))
    held = [
        (name, id(p), group["weight_decay"])
        for name, optimizer in state.optimizers.items()
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    assert sorted(i for _, i, _ in held) == sorted(id(p) for p in language_model.parameters())
    by_id = {i: (name, decay) for name, i, decay in held}
    for name, p in language_model.named_parameters():
        optimizer, decay = by_id[id(p)]
        table = name.startswith(("embed", "blocks.0.mlp.down", "blocks.0.mlp.up"))
        assert optimizer == ("muon" if p.ndim == 2 and not table else "adamw"), name
        assert decay == (0.1 if p.ndim >= 2 else 0.0), name


@pytest.mark.parametrize(("layers", "part"), [("mixers", "mixer"), ("mlps", "mlp")])
def test_muon_can_be_kept_to_some_layers(layers, part):
    language_model = build("AM SM", vocab_size=64, d_model=16)
    optimizers = start(language_model, TrainConfig(muon_on=layers)).optimizers
    muon = {id(p) for p in optimizers["muon"].param_groups[0]["params"]}
    names = {name for name, p in language_model.named_parameters() if id(p) in muon}
    matrices = {
        f"{name}.weight"
        for name, module in language_model.named_modules()
        if isinstance(module, torch.nn.Linear) and f".{part}." in name
    }
    assert names == matrices
    assert len(matrices) >= 4


def test_rows_tell_what_happened():
    config = TrainConfig(batch_size=4, max_steps=5, eval_every=2, test_rows=4)
    rows = list(fit(TASK, start(model(), config, "fp32"), config))
    assert [row.step for row in rows] == [1, 2, 3, 4, 5]
    validated = [row.validation_accuracy is not None for row in rows]
    assert validated == [False, True, False, True, True]
    assert [row.test_accuracy is not None for row in rows] == [False] * 4 + [True]
    accuracy, interval = rows[-1].test_accuracy, rows[-1].test_interval
    assert accuracy is not None
    assert interval is not None
    assert interval[0] <= accuracy <= interval[1]
    assert all(math.isfinite(row.loss) and row.grad_norm > 0 and row.seconds > 0 for row in rows)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_step_moves_every_parameter(precision):
    config = TrainConfig(batch_size=4, max_steps=1, test_rows=4, warmup_steps=0)
    language_model = model()
    before = [p.clone() for p in language_model.parameters()]
    list(fit(TASK, start(language_model, config, precision), config))
    for old, new in zip(before, language_model.parameters(), strict=True):
        assert not torch.equal(old, new)


@pytest.fixture
def after_a_step():
    """A model after its first step, and the steps to come."""
    config = TrainConfig(batch_size=4, max_steps=3, test_rows=4)
    state = start(model(), config, "fp32")
    steps = fit(TASK, state, config)
    next(steps)
    return state.model, steps


def test_a_broken_weight_is_named_and_not_made_worse(after_a_step):
    language_model, steps = after_a_step
    with torch.no_grad():
        language_model.embed.weight.fill_(torch.nan)
    others = [p.clone() for p in language_model.blocks.parameters()]
    with pytest.raises(DivergedError, match="loss=nan at step 2"):
        next(steps)
    for old, new in zip(others, language_model.blocks.parameters(), strict=True):
        assert torch.equal(old, new)


def test_an_exploded_loss_is_named(after_a_step):
    language_model, steps = after_a_step
    with torch.no_grad():
        language_model.norm_final.weight.mul_(-1e4)
    with pytest.raises(DivergedError, match=r"loss=.* at step 2, above"):
        next(steps)


def test_the_rate_falls_with_the_share_of_wrong_answers_and_goes_on_with_it(tmp_path):
    config = TrainConfig(
        learning_rate=1e-3,
        warmup_steps=0,
        schedule="error",
        batch_size=4,
        max_steps=3,
        eval_every=2,
    )
    run = Run(tmp_path / "run", TASK, ModelConfig(stack="AM", d_model=16), config)
    state = run.load_state(torch.device("cpu"))
    state.annealing = Annealing(wrong=0.025)
    state.precision = "fp32"
    first, second, _ = fit(TASK, state, replace(config, test_rows=4))
    assert (first.learning_rate, second.learning_rate) == (pytest.approx(5e-4), pytest.approx(5e-4))
    assert second.validation_accuracy is not None
    state.annealing = Annealing(wrong=0.0625, least=0.05, waits=2, halvings=1)
    run.claim()
    save_checkpoint(run, state)
    assert run.load_state(torch.device("cpu")).annealing == state.annealing


def test_tables_learn_at_a_rate_of_their_own_while_rows_are_shortest():
    config = TrainConfig(
        learning_rate=1e-3,
        table_learning_rate=5e-3,
        warmup_steps=0,
        batch_size=4,
        max_steps=4,
        eval_every=1,
        test_rows=4,
        lengthen=True,
        lengthen_at=1.0,
    )
    state = start(model(), config, "fp32")
    tables, rest = state.optimizers["adamw"].param_groups
    assert [id(p) for p in tables["params"]] == [id(state.model.embed.weight)]
    steps = fit(TASK, state, config)
    next(steps)
    assert (tables["lr"], rest["lr"]) == (pytest.approx(5e-3), 1e-3)
    state.stage = 1
    next(steps)
    assert (tables["lr"], rest["lr"]) == (1e-3, 1e-3)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_the_head_multiplies_in_the_precision_asked_for(precision, dtype, monkeypatch):
    def watch(hidden, weight, targets, **options):
        dtypes.append((hidden.dtype, weight.dtype))
        return linear_cross_entropy(hidden, weight, targets, **options)

    dtypes = []
    monkeypatch.setattr("lab.training.loop.linear_cross_entropy", watch)
    differentiate(model(), TASK.batch(size=4), precision)
    assert dtypes == [(dtype, dtype)]


def test_a_step_counts_its_validation_and_not_its_test(monkeypatch):
    clock = {"cpu": 0.0}

    def evaluate(*args, split="test", **kwargs):
        clock["cpu"] += {"validation": 5.0, "test": 7.0}[split]
        return Evaluation(loss=0.0, accuracy=0.995, interval=(0.9, 1.0), scored=8, rows=4)

    def count(*args, **kwargs):
        clock["cpu"] += 1.0
        return differentiate(*args, **kwargs)

    monkeypatch.setattr("lab.training.loop.evaluate", evaluate)
    monkeypatch.setattr("lab.training.loop.differentiate", count)
    monkeypatch.setattr("lab.training.loop.time.process_time", lambda: clock["cpu"])
    config = TrainConfig(batch_size=2, max_steps=2, eval_every=2)
    rows = list(fit(TASK, start(model(), config, "fp32"), config))
    assert [row.cpu_seconds for row in rows] == [1.0, 6.0]
    assert rows[1].test_accuracy == 0.995
