"""Training from Python: one line gives a run that shows itself, as the command would train it."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import lab
from lab.api import progress
from lab.api.settings import describe_run
from lab.files import RunError
from lab.models.anatomy import StateSize
from lab.training.experiment import Plan
from lab.training.loop import Row
from lab.training.speed import StepTime
from tasks import TASKS

SETTINGS = {"seq_len": 8, "vocab_size": 16, "d_model": 16, "test_rows": 4, "history": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "tiny"
    return lab.train("mqar", stack="AM", steps=2, out=out, **SETTINGS)


def test_one_line_trains_what_the_command_would(run):
    same, _ = describe_run("mqar", {"stack": "AM", "max_steps": 2, **SETTINGS}, run.path)
    assert run.run == same
    assert run.result["steps"] == 2
    assert 0 <= run.accuracy <= 1
    assert run.model(run.task.batch(size=1).inputs).shape == (1, 8, 16)
    assert not run.model.training


def test_the_same_line_again_does_not_train_again(run):
    task = TASKS["mqar"](seq_len=8, vocab_size=16)
    before = {file: file.stat().st_mtime_ns for file in run.path.rglob("*")}
    settings = {name: SETTINGS[name] for name in ("d_model", "test_rows", "history")}
    again = lab.train(task, stack="AM", steps=2, out=str(run.path), **settings)
    assert again.result == run.result
    assert {file: file.stat().st_mtime_ns for file in run.path.rglob("*")} == before


def test_run_report_and_analyses_show_themselves(run):
    assert "this model" in run._repr_html_()
    assert "not solved" in repr(run)
    found = run.analyze("anatomy", "baselines", rows=4)
    assert sorted(found) == ["anatomy", "baselines"]
    assert found["baselines"][0].says in repr(found)
    for shown in (found, run.report()):
        page = shown._repr_html_()
        assert page.startswith('<iframe srcdoc="')
        assert "What is it made of?" in page or "anatomy" in page
        assert page.count('"') == 4
    with pytest.raises(ValueError, match=r"only=anatom: is not an analysis\. Did you mean anatomy"):
        run.analyze("anatom")
    with pytest.raises(ValueError, match=r"only=anatom: is not an analysis\. Did you mean anatomy"):
        run.analyze(only=["baselines", "anatom"])
    assert list(run.analyze(only="baselines", rows=4)) == ["baselines"]
    with pytest.raises(ValueError, match="step=99: must be one of 0, 2"):
        run.analyze(step=99)


def test_a_folder_opens_as_its_run(run, tmp_path):
    again = lab.open(run.path)
    assert (again.run, again.result) == (run.run.recall_precision(), run.result)
    assert again.subject.step == 2
    assert "this model" in repr(again)
    unended = replace(run.run, path=tmp_path / "run")
    unended.claim()
    assert repr(lab.open(str(unended.path))).startswith("mqar: has not ended\nrun folder: ")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((torch.nn.Identity(),), r'model=Identity: give its kind first: lab\.open\("hf", model\)'),
        (("hf",), r'model=None: must be given after "hf": lab\.open\("hf", model\)'),
        (("runs/nope", torch.nn.Identity()), "kind='runs/nope': must be one of hf, fla"),
    ],
    ids=str,
)
def test_what_cannot_be_opened_is_answered_with_what_can(given, words):
    with pytest.raises(ValueError, match=words):
        lab.open(*given)
    with pytest.raises(RunError, match="nope is not a run folder"):
        lab.open("nope")


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        ("mqr", {}, "task='mqr': is not a task. Did you mean mqar"),
        ("mqar", {"d_modell": 8}, "d_modell: is not a setting. Did you mean d_model"),
        ("mqar", {"batch_size": "8"}, "batch_size='8': must be a whole number"),
        ("mqar", {"seq_len": 3}, "seq_len=3"),
        ("mqar", {"seq_len": "16"}, "seq_len='16': must be a whole number"),
        ("mqar", {"options": {"A.maks": "soft"}}, "unknown option A.maks"),
        ("mqar", {"steps": 5, "max_steps": 7}, "steps and max_steps are the same setting"),
        (5, {}, "task=5: must be the name of a task, or a task"),
        (TASKS["copy"](), {"seq_len": 8}, "seq_len: is an option of the task"),
    ],
    ids=str,
)
def test_errors_name_the_setting(task, settings, words):
    with pytest.raises(ValueError, match=words):
        lab.train(task, **settings)


def test_a_notebook_has_a_bar_in_its_output(run, monkeypatch):
    import IPython.display

    shown = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data.get("text/html")))
    monkeypatch.setattr(IPython.display, "display", lambda *args, **options: handle)
    shell = SimpleNamespace(kernel=None)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    row = Row(2, 8, 0.1, 0.5, 1e-3, 1.0, 0.1, 0.1, validation_accuracy=0.25)
    with progress.choose_progress(run.run) as bar:
        bar.on_plan(
            Plan(
                torch.device("cpu"),
                StepTime("fp32", 1, 0.1),
                [],
                1234,
                StateSize(8, 512),
                0,
                (4, 8),
            )
        )
        bar.on_row(row)
        bar.on_row(replace(row, step=3))
        bar.on_note("evaluating")
    assert "1,234 parameters on cpu in fp32" in shown[0]
    assert 'value="0.750"' in shown[1]
    assert "step 2, rows of 8 tokens, accuracy 0.500, validation 0.250" in shown[1]
    assert "mqar: evaluating …" in shown[2], "the step at once after another is not shown"
    assert shown[3:] == [None]


def test_import_lab_imports_nothing_heavy():
    program = "import lab, sys; print('train' in dir(lab), {'torch', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "set()"], done.stderr
    with pytest.raises(AttributeError, match="module 'lab' has no attribute 'trian'"):
        lab.trian  # type: ignore[attr-defined]  # noqa: B018
