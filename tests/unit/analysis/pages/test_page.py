"""The parts of pages: where figures come from, formulas, plotly.js, which sections are open."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import analysis
from analysis.base import Subject
from analysis.pages import page
from analysis.pages.page import FORMULAS, pack_plotly, typeset
from analysis.pages.report import FEW, KEY, OPEN, choose_open, pick_key_findings
from lab import layers
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


def test_few_sections_are_all_open_and_the_first_key_findings_are_shown():
    few = [f"analysis {i}" for i in range(FEW)]
    assert choose_open(few) == {*few}
    assert choose_open([*few, "one more"]) == {*OPEN}
    assert pick_key_findings({KEY[1]: "It holds.", "rows": "Rows."}) == [(KEY[1], "It holds.")]


def test_formulas_become_mathml_and_the_rest_is_escaped():
    text = typeset("A share of Σ_j |M_ij| is 5 % <b> of |M|")
    assert text.startswith("A share of <math")
    assert text.count("</math>") == 2
    assert " is 5\N{NO-BREAK SPACE}% &lt;b&gt; of <math" in text
    assert typeset("no formula & no tag") == "no formula &amp; no tag"


def test_every_formula_is_well_formed_and_in_use():
    paths = [
        *Path(analysis.__file__).parent.rglob("*.py"),
        *Path(layers.__file__).parent.glob("*.py"),
    ]
    written = "".join(path.read_text() for path in paths if path.name != "page.py")
    written = re.sub(r'"\s*\n\s*f?"', "", written)
    for plain in FORMULAS:
        assert plain in written
        ElementTree.fromstring(typeset(plain))


def test_a_page_gets_what_it_draws_and_not_what_it_does_not():
    lines, matrices = (len(pack_plotly(types)) for types in (["scatter"], ["heatmap", "bar"]))
    assert lines < matrices < 0.6 * 2**20
    assert len(pack_plotly(["a type of tomorrow"])) > 3 * matrices
