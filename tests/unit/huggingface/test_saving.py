"""`lab save-pretrained`: a run's model, its card and its tokenizer in a folder for transformers."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from lab.api.settings import read_settings
from lab.cli.app import app
from lab.config import Runtime
from lab.files import RunError
from lab.huggingface.saving import convert, save_run
from lab.training.experiment import carry_out
from lab.training.run import Run

SMALL = {"d_model": 8, "batch_size": 4, "max_steps": 4, "test_rows": 8, "precision": "fp32"}


def train(task: str, folder, **options) -> Run:
    run, _ = read_settings(task, {**SMALL, **options}, folder)
    run = Run(folder, run.task, run.model, run.train)
    carry_out(run, Runtime(threads=1))
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    path = tmp_path_factory.mktemp("mqar") / "run"
    return train("mqar", path, seq_len=8, vocab_size=32, stack="SE IE")


def test_a_saved_run_gives_the_logits_of_the_run(run, tmp_path):
    answer = CliRunner().invoke(app, ["save-pretrained", str(run.path), str(tmp_path / "hf")])
    assert answer.exit_code == 0, answer.output
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokens = run.task.batch(split="test", size=4).inputs
    ours = run.load_model(4)(tokens)
    assert torch.allclose(loaded(tokens).logits, ours, rtol=0, atol=1e-5)
    card = (tmp_path / "hf" / "README.md").read_text()
    result = run.read_result()
    assert result is not None
    assert f"trained for 4 steps. Accuracy on its test split: {result['accuracy']:.3f}." in card
    assert 'from_pretrained("hf")' in card


def test_weights_of_an_earlier_step_can_be_saved(run):
    first, last = convert(run, 0), convert(run)
    assert torch.equal(first.model.embed.weight, run.build().embed.weight)
    assert not torch.equal(first.model.embed.weight, last.model.embed.weight)
    with pytest.raises(RunError, match="no weights of step 3000"):
        convert(run, 3000)


def test_a_model_that_reads_vectors_is_refused(tmp_path):
    run = train("regression", tmp_path / "run", seq_len=8, n_dims=2, stack="AM")
    with pytest.raises(ValueError, match="its model reads vectors, a causal language model tokens"):
        convert(run)


def test_nothing_is_overwritten(run, tmp_path):
    (tmp_path / "mine").touch()
    answer = CliRunner().invoke(app, ["save-pretrained", str(run.path), str(tmp_path)])
    assert answer.exit_code == 1
    assert answer.stderr.strip().endswith("must be new or empty")
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_a_mixer_of_your_own_is_refused(tmp_path):
    own = {"model": "tests.integration.mixers:Good", "stack": "UM"}
    run = train("mqar", tmp_path / "run", seq_len=8, vocab_size=32, **own)
    with pytest.raises(ValueError, match="mixer of your own"):
        save_run(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_model_of_bytes_comes_with_its_tokenizer(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("naïve café, 50 €; " * 30)
    run = train("bytes", tmp_path / "run", path=str(text), seq_len=8)
    save_run(run, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for words in ("naïve café, 50 €; ", "two\nlines\tand 𝄞", "a  b<|endoftext|>"):
        assert tokenizer(words)["input_ids"] == list(words.encode())
        assert tokenizer.decode(list(words.encode())) == words
    # Harnesses end a text at the token that tokenizer and model name.
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert tokenizer.eos_token_id == config.eos_token_id == config.pad_token_id == 0
    assert tokenizer.decode([tokenizer.eos_token_id]) == "\0"
    batch = tokenizer(["naïve", "ab"], return_tensors="pt", padding=True)
    assert batch["attention_mask"].tolist() == [[1] * 6, [0] * 4 + [1] * 2]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    padded = loaded(**batch).logits[1, -1]
    alone = loaded(torch.tensor([list(b"ab")])).logits[0, -1]
    assert torch.allclose(padded, alone, atol=1e-5)
    assert str(text) not in (tmp_path / "hf" / "README.md").read_text()
