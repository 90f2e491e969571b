"""What a model writes is what it generates; bits are its loss; texts are escaped on the page."""

import math

import pytest
import torch
from torch import nn

from analysis.base import Passages, Subject
from analysis.examination import examine
from analysis.pages.page import PagePart, build_page, show_finding
from analysis.rows.samples import measure, spell
from lab.config import ModelConfig, TrainConfig
from lab.layers.mixer import adapt
from lab.models import Block, build
from lab.training.run import Run
from tasks.language import Language
from tasks.next_byte import Bytes

TEXT = "<script>alert('no')</script> & más \x1b\x7f\r\n" * 40


@pytest.fixture
def task(tmp_path) -> Bytes:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return Bytes(path=str(path), seq_len=40, test_share=0.5)


def subject(task, rows: int = 6) -> Subject:
    model = build("SM", vocab_size=task.vocab_size, d_model=16).eval()
    return Subject(task, model, task.batch(split="test", size=rows), seed=3)


@torch.no_grad()
def test_bits_are_the_loss_and_samples_what_it_generates(task):
    of = subject(task)
    (found,) = measure(of)
    loss = nn.functional.cross_entropy(
        of.model(of.batch.inputs).flatten(0, 1), of.batch.targets.flatten()
    ).item()
    assert found.bits.value == pytest.approx(loss / math.log(2), rel=1e-4)
    assert found.perplexity.value == pytest.approx(math.exp(loss), rel=1e-4)
    assert found.bits.low < found.bits.value < found.bits.high
    assert (found.unit, found.scored, found.bits.chance) == ("byte", 240, 8)
    assert len(found.samples) == 3
    rows = of.batch.inputs[:3]
    greedy = of.model.generate(rows[:, :20], 20)[:, 20:]
    drawn = of.model.generate(rows[:, :20], 20, temperature=0.8, top_k=40, seed=3)[:, 20:]
    for i, sample in enumerate(found.samples):
        assert sample.prompt == spell(task, rows[i, :20])
        assert sample.text == spell(task, rows[i, 20:])
        assert sample.greedy == spell(task, greedy[i])
        assert sample.drawn == spell(task, drawn[i])
    assert measure(of)[0].samples == found.samples


def test_every_byte_can_be_seen(task):
    def of(*values: int) -> str:
        return spell(task, torch.tensor(values))

    assert of(*b"a\tb\n") == "a\tb\n"
    assert of(0, 27, 127, 13) == "␀␛␡␍"
    assert of(*"é".encode(), 0xFF, 0xE2) == "é\\xff\\xe2"
    assert of(32, 32) == "␣␣"
    assert of(*"\u202e".encode()) == "\\u202e"  # would turn the text around


def test_the_page_shows_text_as_text(task, tmp_path):
    run = Run(tmp_path / "run", task, ModelConfig(stack="SM", d_model=8), TrainConfig(test_rows=4))
    run.claim()
    examination = examine(Subject.of(run, step=0, rows=4), ["samples"])
    shown = show_finding(examination.results["samples"][0], "")
    assert shown.spec is None
    page = build_page("", "", "", [PagePart("samples", "", figures=[("samples-1", shown)])])
    assert "&lt;script&gt;alert(" in page
    assert "<script>alert(" not in page
    assert page.count('class="passage"') == 3
    assert isinstance(examination.results["samples"][0].figure(), Passages)


class Opaque(nn.Module):
    """A mixer that cannot decode."""

    def forward(self, x):
        return x


def test_a_mixer_that_cannot_decode_still_has_its_bits(task):
    of = subject(task)
    block = of.model.blocks[0]
    assert isinstance(block, Block)
    block.mixer = adapt(Opaque())
    (found,) = measure(of)
    assert found.samples == ()
    assert "there are no continuations: Opaque cannot decode" in found.says
    assert found.figure() is None


@torch.no_grad()
def test_legal_answers_are_those_that_the_walk_allows():
    task = Language(seq_len=48, max_states=5, n_symbols=6, max_length=8)
    of = subject(task, rows=5)
    (found,) = measure(of)
    answers = of.model(of.batch.inputs).argmax(-1)
    legal, allowed, count = 0, 0, 0
    for row in range(5):
        state, symbols = 0, of.batch.links["symbol_of"][row].tolist()
        following = of.batch.links["next_state"][row].tolist()
        for position, token in enumerate(of.batch.inputs[row].tolist()):
            state = following[state][symbols[state].index(token)] if token else 0
            if of.batch.targets[row, position] != -100:
                choices = [symbol for symbol in symbols[state] if symbol >= 0]
                legal += int(answers[row, position]) in choices
                allowed, count = allowed + len(choices), count + 1
    assert found.legal is not None
    assert found.legal.share == pytest.approx(legal / count)
    assert found.legal.guess == pytest.approx(allowed / count / 6)
    assert set(found.samples[0].drawn) <= set("abcdef|")
