"""The page in a real browser: whole, quiet, legible, honest, and reachable by keyboard."""

import base64
import csv
import re
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch

from analysis.base import Subject
from analysis.examination import Examination, examine
from analysis.mixing import collect_mixers
from analysis.pages.report import render, write_both
from lab.config import ModelConfig, TrainConfig
from lab.training.checkpoint import keep_weights, save_checkpoint
from lab.training.loop import start
from lab.training.run import Run
from tasks.mqar import MQAR
from tests.pixels import COLORS, COUNTS
from tests.planted_runs import make_result, make_row, write_rows

MATRIX = "#matrices-1"
"""The first matrix of a report."""
MEBIBYTE = 2**20
BY_POSITION = ["rows", "positions", "tokens", "matrices", "rollout", "state_space"]
"""Analyses whose figures grow with the row."""
CUT = """
  [...document.querySelectorAll(".plot")].flatMap((plot) => {
    const { left, right } = plot.getBoundingClientRect();
    return [...plot.querySelectorAll("svg text")].filter((text) => {
      const box = text.getBoundingClientRect();
      return box.width && (box.left < left - 1 || box.right > right + 1);
    });
  }).map((text) => text.textContent).concat(
    [...document.querySelectorAll("figure .wide")]
      .filter((table) => table.querySelectorAll("thead th").length < 7)
      .filter((table) => table.scrollWidth > table.clientWidth)
      .map((table) => `${table.getAttribute("aria-label")}: ${table.scrollWidth} px`))
"""
"""Texts that end outside their figure, and tables of up to six columns that one must scroll."""
HOSTILE = '<img src=x onerror="window.hacked=1">'


def trained(path, task, **model) -> Run:
    """A run folder as training leaves it, without the training."""
    train = TrainConfig(max_steps=4, batch_size=4, test_rows=8, eval_every=2)
    run = Run(path, task, ModelConfig(**{"stack": "IE SM", "d_model": 16, **model}), train)
    run.claim()
    rows = [
        make_row(step, seq_len=task.seq_len, loss=5 / step, accuracy=step / 8)
        for step in range(1, 5)
    ]
    for row in rows[1::2]:
        row |= {"test_loss": row["loss"], "test_accuracy": row["accuracy"]}
    write_rows(run, rows)
    state = start(run.build(), run.train, "fp32")
    for state.step in range(1, 5):
        with torch.no_grad():
            for weight in state.model.parameters():
                weight.mul_(1.05)
        keep_weights(run, state.step, state.model)
    save_checkpoint(run, state)
    ended = {"accuracy": 0.5, "loss": 1.25, "steps": 4, "seconds": 2.0, "stopped": "budget"}
    run.write_result(make_result(**ended, seq_len=task.seq_len))
    return run


def examined(run: Run) -> Examination:
    return examine(Subject.of(run, rows=8))


def figures(examination: Examination) -> int:
    """How many figures the report has."""
    return sum(
        isinstance(result.figure(), go.Figure)
        for results in examination.results.values()
        for result in results
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A run whose model has something for nearly every analysis."""
    options = {"I.mask": "soft", "I.n_values": 4, "E.n_experts": 64, "E.k": 4}
    path = tmp_path_factory.mktemp("runs") / "run"
    return trained(path, MQAR(seq_len=32, vocab_size=64), options=options)


@pytest.fixture(scope="module")
def examination(run) -> Examination:
    found = examined(run)
    write_both(run, found)
    return found


@dataclass(frozen=True)
class Page:
    """A short report, for what does not depend on which analyses it shows."""

    path: Path
    examination: Examination


@pytest.fixture(scope="module")
def short(run, tmp_path_factory) -> Page:
    found = examine(Subject.of(run, rows=8), ["baselines", "curves", "matrices", "experts"])
    path = tmp_path_factory.mktemp("short") / "report.html"
    path.write_text(render(run, found))
    return Page(path, found)


def wait_until_drawn(page):
    """Wait until all figures that can be seen are drawn; fail with what the page complains of."""
    from playwright.sync_api import TimeoutError

    try:
        page.wait_for_selector("html[data-drawn]", state="attached")
    except TimeoutError:
        state = page.evaluate("[document.readyState, figures.map(({drawn}) => Boolean(drawn))]")
        pytest.fail(f"not drawn: {state}, {page.complaints}")


@pytest.fixture
def visit(browser):
    """Open a page; what it complains of and whom it calls is collected."""
    contexts = []

    def visit(path, width=1280, scheme="light", unfolded=True):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.complaints, page.calls = [], []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.calls.append(request.url))
        page.goto(path.as_uri())
        wait_until_drawn(page)
        if unfolded:
            page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
            page.evaluate("unfoldAll()")
            wait_until_drawn(page)
        return page

    yield visit
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_page_is_whole_and_quiet(run, examination, visit, width, scheme):
    page = visit(run.path / "report.html", width, scheme)
    assert page.complaints == []
    outside = [url for url in page.calls if not url.startswith(("data:", "blob:"))]
    assert outside == [(run.path / "report.html").as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(CUT) == []
    paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 22, 26)"}[scheme]
    assert (run.path / "report.html").stat().st_size < MEBIBYTE
    plots = page.locator(".plot").all()
    assert len(plots) == figures(examination) > 15
    shot = base64.b64encode(page.screenshot(full_page=True)).decode()
    assert min(page.evaluate(COUNTS, shot)) > 20
    for plot in plots:
        assert paper in plot.locator(".main-svg").first.get_attribute("style")


def test_figures_follow_a_change_of_theme(run, short, visit):
    page = visit(short.path)
    page.emulate_media(color_scheme="dark")
    dark = page.locator(".main-svg[style*='rgb(20, 22, 26)']")
    dark.nth(figures(short.examination) - 1).wait_for(state="attached")
    assert page.complaints == []


def test_everything_is_reachable_by_keyboard_and_named(run, short, visit):
    page = visit(short.path)
    reached = []
    for _ in range(15 + 2 * len(short.examination.results) + 6 * figures(short.examination)):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "(({ id, hash, dataset }) => id || hash || dataset.view ||"
                " `${dataset.save}.${dataset.format}`)"
                "(document.activeElement)"
            )
        )
    assert {f"#{name}" for name in short.examination.results} <= set(reached)
    for plot in page.locator(".plot").all():
        name = plot.get_attribute("id")
        assert {name, *(f"{name}.{kind}" for kind in ("png", "svg", "csv"))} <= set(reached)
        assert plot.get_attribute("role") == "img"
        assert len(plot.get_attribute("aria-label")) > 40


def test_sections_fold_and_links_unfold_them(run, short, visit):
    page = visit(short.path, unfolded=False)
    matrix = page.locator(MATRIX)
    assert matrix.is_hidden()
    page.locator(".contents a[href='#matrices']").click()
    page.locator(f"{MATRIX} .main-svg").first.wait_for(state="visible")
    page.locator("#matrices > details > summary").focus()
    page.keyboard.press("Enter")
    assert matrix.is_hidden()
    assert page.locator("#matrices .gist").is_visible()


def test_what_the_window_shows_is_drawn_first(run, short, visit):
    page = visit(short.path)
    order = page.evaluate("""async () => {
      const order = [];
      draw = async ({ place }) => { order.push(place.id); };
      for (const figure of figures) figure.drawn = false;
      figures.at(-1).place.scrollIntoView();
      await queueDrawing();
      return order;
    }""")
    shown = page.evaluate("figures.map(({ place }) => place.id)")
    assert order[0] == shown[-1] != shown[0] == order[-1]
    assert sorted(order) == sorted(shown)


def test_a_model_that_has_learned_nothing_has_a_short_page(visit, tmp_path):
    run = trained(tmp_path / "run", MQAR(seq_len=16, vocab_size=32))
    run.write_result({**(run.read_result() or {}), "accuracy": 0.05})
    page = visit(write_both(run, examined(run)).page, unfolded=False)
    assert page.evaluate("document.documentElement.scrollHeight") < 4000
    assert "It has learned almost nothing" in page.locator("#aside").text_content()
    assert "Why trust it?" not in page.locator("#summary").text_content()
    assert page.locator(MATRIX).is_hidden()


def test_a_token_shows_where_a_head_looks_from_it(run, examination, visit):
    page = visit(run.path / "report.html", unfolded=False)
    page.locator(".heads button").nth(1).click()
    chips, (found,) = page.locator(".token"), examination.results["tokens"]
    assert chips.count() == 32
    chips.nth(20).hover()
    subject = examination.subject
    row = int(found.title.split()[1])
    mixers = collect_mixers(subject.model, subject.batch[row : row + 1])
    matrices = torch.cat([mixer.matrix(0).abs() for mixer in mixers]).detach()
    share = (matrices[1, 20] / matrices[1, 20].sum()).tolist()
    for i, chip in enumerate(chips.all()):
        shown = float(chip.evaluate("chip => parseFloat(chip.style.getPropertyValue('--share'))"))
        assert shown == pytest.approx(100 * share[i], abs=0.01)
        assert chip.get_attribute("aria-selected") == str(i == 20).lower()
    wrong = page.locator(".token .wrong").count()
    assert wrong == found.scored - found.right
    chips.nth(20).click()
    page.keyboard.press("ArrowRight")
    assert chips.nth(21).get_attribute("aria-selected") == "true"


def test_a_cell_names_what_meets_in_it(run, short, visit):
    page = visit(short.path)
    plot = page.locator(MATRIX)
    plot.scroll_into_view_if_needed()
    box = plot.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.9 * box["height"])
    tip = page.locator("#tip")
    tip.wait_for(state="visible")
    found = re.fullmatch(
        r"i = (\d+): (\w+), token (\d+)\nj = (\d+): (\w+), token (\d+)\n"
        r"i − j = (\d+), value ([\d.e-]+)",
        tip.text_content(),
    )
    assert found
    i, role, token, j, _, _, lag, _ = found.groups()
    batch = run.task.batch(split="test", size=1, seed=run.train.seed)
    assert batch.inputs[0, int(i)] == int(token)
    assert run.task.role_names[batch.roles[0, int(i)]] == role
    assert int(i) - int(j) == int(lag)


def test_a_figure_can_be_saved(run, short, visit):
    page = visit(short.path)
    with page.expect_download() as download:
        page.locator("[data-save][data-format=svg]").first.click()
    saved = download.value.path().read_text()
    assert "Test accuracy against rules" in saved
    assert "mqar · IE SM · run · step 4 · seed 0" in saved
    assert page.complaints == []


def test_the_values_of_the_row_that_is_chosen_are_saved(short, visit):
    page, wanted = visit(short.path), "test row 1"
    page.locator(f"{MATRIX}-title").scroll_into_view_if_needed()
    page.locator("[data-view=matrices-1]").select_option(wanted)
    with page.expect_download() as download:
        page.locator("[data-save=matrices-1][data-format=csv]").click()
    with download.value.path().open() as file:
        rows = list(csv.DictReader(file))
    (matrix,) = short.examination.results["matrices"][0].views[wanted].picture.weights
    assert len(rows) == 32 * 33 // 2
    for row in rows:
        entry = matrix[int(row["y"]), int(row["x"])]
        assert float(row["value"]) == pytest.approx(entry, rel=1e-3)
    with page.expect_download() as download:
        page.locator("[data-save=baselines-1][data-format=csv]").click()
    with download.value.path().open() as file:
        scores = {row["y"]: row["x"] for row in csv.DictReader(file)}
    assert (float(scores["model"]), float(scores["oracle"])) == (0.5, 1.0)
    assert page.complaints == []


def test_tampered_numbers_are_flagged(run, short, visit, tmp_path):
    untouched = short.path.read_text()
    assert visit(short.path).locator("#alarm").is_hidden()
    forged = {"accuracy": ("50.0 %", "93.0 %"), "loss": ("1.250", "0.125"), "steps": ("4", "400")}
    text = untouched
    for name, (shown, tampered) in forged.items():
        old = f'data-headline="{name}">{shown}<'
        assert text.count(old) == 1
        text = text.replace(old, f'data-headline="{name}">{tampered}<')
    copy = tmp_path / "report.html"
    copy.write_text(text)
    page = visit(copy)
    assert page.locator("#alarm").is_visible()
    assert page.locator(".disagrees").all_text_contents() == [t for _, t in forged.values()]
    for name, (_, tampered) in forged.items():
        assert f"{name} is shown as {tampered}" in page.locator("#alarm").text_content()


def test_a_result_that_the_metrics_deny_is_flagged(visit, tmp_path):
    run = trained(tmp_path / "run", MQAR(seq_len=16, vocab_size=32))
    run.write_result({**(run.read_result() or {}), "accuracy": 0.99})
    page = visit(write_both(run, examine(Subject.of(run), ["baselines"])).page)
    assert "accuracy is shown as 99.000 %" in page.locator("#alarm").text_content()


@dataclass(frozen=True, kw_only=True)
class Hostile(MQAR):
    """A task whose every text tries to break out."""

    role_names = (HOSTILE,) * 4
    note: str = field(default=f"</script>{HOSTILE}")

    def shortcuts(self):
        return {HOSTILE: self.oracle}


def test_hostile_text_stays_text(visit, tmp_path):
    harmless = trained(tmp_path / "<b onclick=x>&amp;", MQAR(seq_len=16, vocab_size=32))
    run = replace(harmless, task=Hostile(seq_len=16, vocab_size=32))
    found = examined(run)
    file = tmp_path / "report.html"
    file.write_text(render(run, found))
    page = visit(file)
    plot = page.locator(MATRIX)
    plot.scroll_into_view_if_needed()
    box = plot.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.9 * box["height"])
    page.locator("#tip").wait_for(state="visible")
    assert HOSTILE in page.locator("#tip").text_content()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.get_by_text("<b onclick=x>&amp;").count() == 1
    assert page.complaints == []


def test_long_sequences_stay_within_budget(visit, tmp_path):
    run = trained(tmp_path / "run", MQAR(seq_len=1024, vocab_size=2048), d_model=8)
    found = examine(Subject.of(run, rows=2), BY_POSITION)
    path = write_both(run, found).page
    text = path.read_text()
    specs = re.findall(r'data-figure="[^"]*">(.*?)</script>', text, re.DOTALL)
    assert len(specs) == figures(found)
    assert max(len(zlib.decompress(base64.b64decode(spec))) for spec in specs) < 3 * MEBIBYTE
    assert path.stat().st_size < 3_000_000
    page = visit(path)
    assert page.complaints == []
    shot = base64.b64encode(page.locator(MATRIX).screenshot()).decode()
    assert len(page.evaluate(COLORS, shot)[2]) > 20
