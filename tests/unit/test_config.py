"""Configurations: bounds, unknown names, and the paper's protocol number by number."""

import math
import re

import pytest

from lab.config import ModelConfig, Runtime, TrainConfig, get_protocol_defaults


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelConfig(d_model=65, n_heads=2), "d_model=65: must be a multiple of n_heads=2"),
        (lambda: ModelConfig(n_heads=0), "n_heads=0: must be ≥ 1"),
        (lambda: ModelConfig(embedding_std=0.0), "embedding_std=0.0: must be > 0"),
        (lambda: TrainConfig(batch_size=0), "batch_size=0: must be ≥ 1"),
        (lambda: TrainConfig(test_rows=2**36 + 1), "test_rows=68719476737: must be ≤ 68719476736"),
        (lambda: TrainConfig(train_rows=2**37), "train_rows=137438953472: must be ≤ 68719476736"),
        (
            lambda: get_protocol_defaults("lab", 64, 256, "1:1000000000"),  # type: ignore[arg-type]
            "d_model='1:1000000000': must be a whole number",
        ),
        (lambda: TrainConfig(learning_rate=0.0), "learning_rate=0.0: must be > 0"),
        (lambda: TrainConfig(warmup_steps=-1), "warmup_steps=-1: must be ≥ 0"),
        (lambda: TrainConfig(solved_at=1.5), "solved_at=1.5: must be in (0, 1]"),
        (lambda: TrainConfig(train_rows=100), "train_rows=100: must be a positive multiple of"),
        (lambda: TrainConfig(seed=10**23), "in 0 … 2⁶³ − 1"),
        (
            lambda: TrainConfig.from_dict({"optimizer": "sgd"}),
            "optimizer='sgd': must be one of muon",
        ),
        (lambda: TrainConfig(learning_rate=math.inf), "learning_rate=inf: must be > 0 and finite"),
        (lambda: Runtime(checkpoint_every=0), "checkpoint_every=0: must be ≥ 1"),
        (lambda: Runtime(max_minutes=0.0), "max_minutes=0.0: must be > 0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bounds_are_named(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"unknown option 'lr'\. Did you mean learning_rate"):
        TrainConfig.from_dict({"lr": 1.0})


@pytest.mark.parametrize(("seq_len", "batch"), [(256, 256), (512, 128), (1024, 64), (2048, 32)])
@pytest.mark.parametrize(("d_model", "rate"), [(32, 4e-4), (64, 3e-4), (128, 2e-4), (256, 1e-4)])
def test_the_papers_protocol(seq_len, batch, d_model, rate):
    values = get_protocol_defaults("paper", seq_len, 8192, d_model)
    assert values["batch_size"] == batch
    assert values["learning_rate"] == rate
    assert values["train_rows"] == 2**18
    assert values["max_steps"] * batch == 64 * 2**18
    assert values["warmup_steps"] == values["max_steps"] // 10
    assert (values["optimizer"], values["weight_decay"]) == ("adamw", 0.01)


@pytest.mark.parametrize(
    ("seq_len", "d_model", "message"),
    [
        (256, 48, "d_model=48: --protocol paper states learning rates for 32, 64, 128, 256"),
        (128, 64, "seq_len=128: --protocol paper states batches for 256, 512, 1024, 2048"),
    ],
)
def test_what_the_paper_does_not_state_is_an_error(seq_len, d_model, message):
    with pytest.raises(ValueError, match=message):
        get_protocol_defaults("paper", seq_len, 8192, d_model)


@pytest.mark.parametrize(
    ("d_model", "rate"), [(8, 3e-3), (64, 3e-3), (128, 3e-3), (256, 1.5e-3), (1024, 3.75e-4)]
)
def test_a_wide_model_has_a_lower_rate_in_the_labs_protocol(d_model, rate):
    values = get_protocol_defaults("lab", 64, 256, d_model)
    assert values["learning_rate"] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("vocab_size", "rate"), [(5, 3e-3), (256, 3e-3), (1024, 6e-3), (8192, 0.01697), (2**20, 2e-2)]
)
def test_a_larger_table_learns_faster_in_the_labs_protocol(vocab_size, rate):
    values = get_protocol_defaults("lab", 64, vocab_size, 64)
    assert values["table_learning_rate"] == pytest.approx(rate, rel=1e-3)
    assert values["logit_scale"] == 1 / 8
    assert values["lengthen"]
    assert values["shortest_len"] == 16
    assert values["test_rows"] == 1024
    assert get_protocol_defaults("lab", 8192, vocab_size, 64)["test_rows"] == 256
    ModelConfig(logit_scale=values.pop("logit_scale"))
    TrainConfig(**values)
