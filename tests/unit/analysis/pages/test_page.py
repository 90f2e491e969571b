"""What a page says around its figures: where they come from, and which sections are open."""

from dataclasses import replace

from analysis.base import Subject, Words
from analysis.pages import page
from analysis.pages.summary import FEW, KEY, OPEN, choose_open, pick_key_findings
from lab.config import ModelConfig, TrainConfig
from lab.models import build
from lab.training.run import Run
from tasks.mqar import MQAR


def test_a_stamp_names_the_run_the_step_and_the_seed(tmp_path):
    task = MQAR(seq_len=16, vocab_size=32)
    subject = Subject(task, build("AM", vocab_size=32, d_model=8), task.batch(size=1), seed=3)
    assert page.make_stamp(subject) == "mqar · seed 3"
    run = Run(tmp_path / "mine", task, ModelConfig(d_model=8), TrainConfig())
    trained = replace(subject, run=run, step=1200)
    assert page.make_stamp(trained).endswith(" · mine · step 1,200 · seed 3")
    assert page.make_stamp(replace(trained, step=0)).endswith(" · mine · initial weights · seed 3")


def test_values_of_a_configuration_are_written_to_be_read():
    values = {"a": True, "b": None}
    assert page._format_value(values) == "a=yes, b=–"
    assert [*map(page._format_value, ({}, False, (1, 2), 0))] == ["–", "no", "1, 2", "0"]


def test_few_sections_are_all_open_and_the_first_key_findings_are_shown():
    few = [f"analysis {i}" for i in range(FEW)]
    assert choose_open(few) == {*few}
    assert choose_open([*few, "one more"]) == {*OPEN}
    words = {KEY[1]: Words("", "It holds.", "", ""), "rows": Words("", "Rows.", "", "")}
    assert pick_key_findings(words) == [(KEY[1], "It holds.")]
