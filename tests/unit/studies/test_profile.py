"""Scores of profiles on planted tables; what is compared; the card; a whole profile, small."""

import json
import math
from dataclasses import replace

import polars as pl
import pytest
import torch
from torch import nn

import lab
from analysis.profile.scores import collect_scores, find_rate, find_reach, find_skill, find_window
from lab.api.options import ProfileOptions
from lab.api.profiling import ATLAS, make_profile, read_comparable
from lab.api.settings import read_settings
from lab.files import RunError
from lab.studies import profile
from lab.studies.profile import ABILITIES, SCALES, Candidate, build_study
from lab.sweeps.table import MEASURED, list_columns, read_table, save_table
from tests.unit.analysis.cases.profile import per_byte

FRAME = list_columns(build_study([Candidate.of("gdn")], "quick"))


def planted(
    ability: str, *shares: float | None, rate: str = "lab", seed: int = 0, mixer: str = "gdn"
) -> list[dict]:
    """Return the rows of a run by its accuracy at each length; of one that diverged without."""
    lengths = ABILITIES[ability].lengths
    return [
        {
            **dict.fromkeys(MEASURED),
            "mixer": mixer,
            "scale": "quick",
            "ability": ability,
            "learning_rate": rate,
            "seed": seed,
            "seq_len": length,
            "accuracy": share,
            "validation": share,
            "status": "budget" if shares else "diverged",
            "parameters": 1000,
        }
        for length, share in zip(lengths, shares or [None] * len(lengths), strict=True)
    ]


def frame(*runs: list[dict]) -> pl.DataFrame:
    return pl.DataFrame([row for run in runs for row in run], schema=FRAME)


@pytest.mark.parametrize(
    ("skills", "reach"),
    [
        ({16: 1.0, 32: 0.75, 64: 0.25}, 32 * math.sqrt(2)),
        ({16: 0.4, 32: 0.3}, 16.0),
        ({16: 0.3, 32: 1.0}, 32.0),
        ({16: 1.0, 32: 0.5}, 32.0),
        ({16: 1.0, 32: 0.0, 64: 1.0, 128: 0.0}, 64 * math.sqrt(2)),
    ],
)
def test_a_reach_ends_where_half_is_right_last(skills, reach):
    assert find_reach(skills) == pytest.approx(reach)


def test_skill_is_counted_from_chance_or_a_shortcut_to_the_best_possible():
    parity, language = ABILITIES["parity"], ABILITIES["language"]
    assert [find_skill(parity, 16, share) for share in (0.4, 0.5, 0.75, 1.0)] == [0, 0, 0.5, 1]
    assert find_skill(language, 128, 0.50) == pytest.approx(0, abs=0.05)  # a trigram's
    assert find_skill(language, 128, 0.56) == pytest.approx(1, abs=0.05)  # the oracle's


def test_scores_are_means_over_seeds_at_the_chosen_rate():
    runs = [planted("recall", 1, 1, 1, 1, 1, 0.8, 0.4, rate="half")]  # the best on validation rows
    runs += [planted("recall", 1, 1, 0, 0, 0, 0, 0), planted("recall", rate="double")]
    for seed, share in enumerate((0.6, 0.8, 1.0)):
        runs.append(planted("overwrite", share, rate="half", seed=seed))
        runs.append(planted("overwrite", 0.1, seed=seed))
    recall, overwrite = collect_scores(frame(*runs))
    assert (recall.seeds, recall.accuracies[1024]) == (1, 0.4)
    assert 128 < recall.value < 256
    above = (0.8 - 1 / 32) / (1 - 1 / 32)  # chance is 1/32
    assert overwrite.value == pytest.approx(above)
    half = 4.303 * 0.2 / math.sqrt(3) / (1 - 1 / 32)  # Student's
    assert overwrite.interval == pytest.approx((above - half, 1.0), abs=1e-3)
    assert find_window(frame(*runs), "gdn") == ("half",)


def test_the_learning_rate_is_the_best_on_average_over_row_lengths():
    lab = planted("recall", 0.4, 0.4, 0.1, 0, 0, 0, 0.01)
    double = planted("recall", 1, 0.5, 0.1, 0, 0, 0, 0, rate="double")
    half = planted("recall", *[1] * 6, math.nan, rate="half")
    assert find_rate(frame(lab, double), "gdn") == "double"
    assert find_rate(frame(lab, double, planted("recall", rate="half")), "gdn") == "double"
    assert find_rate(frame(lab, double, half), "gdn") == "half"
    assert find_window(frame(lab, double, half), "gdn") == ("half",)


def test_dots_that_lie_close_together_share_one_label():
    def label(*sizes: int) -> dict:
        return per_byte(*sizes)._place_labels()

    assert label(1000) == {"m0": ("m0", "right")}
    assert label(1000, 1100, 4000) == {"m1": ("m0, m1", "right"), "m2": ("m2", "left")}
    chain = label(*(int(1000 * 1.4**i) for i in range(20)))
    assert len(chain) == 10
    (crowd,) = label(*[1000] * 200).values()
    assert crowd[0].endswith("m10, 189 more")


def test_a_run_that_diverged_has_learned_nothing_and_ends_are_said():
    found = collect_scores(
        frame(
            planted("recall", 1, 1, 1, 1, 1, 1, 1),
            planted("copy"),
            planted("parity", 0.5, 0.5, 0.5, 0.5, 0.5, 0.5),
        )
    )
    assert [str(score) for score in found] == ["≥ 256 pairs", "< 32 tokens", "< 4 bits"]
    assert [score.diverged for score in found] == [0, 1, 0]


def test_storage_is_bits_a_parameter():
    (_, storage) = collect_scores(frame(planted("recall", *[1] * 7), planted("storage", 1.0)))
    assert storage.value == pytest.approx(4096 * 5 / 1000)
    assert find_rate(frame(), "gdn") == "lab"


def test_runs_with_other_settings_or_of_other_code_are_not_compared(tmp_path):
    file = tmp_path / "atlas.csv"
    study = build_study([Candidate.of("gdn")], "quick", abilities=["copy"], rates={"gdn": ["lab"]})
    today = read_settings(study.cells[0].task, study.cells[0].options)[0].settings
    rows = frame(
        planted("copy", 1, 1, 1),
        planted("copy", 1, 1, 1, seed=1),
        planted("copy", 1, 1, 1, mixer="evil:Mixer"),
        planted("overwrite", 1, mixer="ssd"),
    )
    rows = rows.with_columns(
        settings=pl.when((pl.col("seed") == 0) & (pl.col("mixer") == "gdn"))
        .then(pl.lit(today))
        .otherwise(pl.lit("older"))
    )
    save_table(rows, file)
    kept = read_comparable(file, "quick")
    assert kept.select("mixer", "ability", "seed").unique().rows() == [("gdn", "copy", 0)]
    assert read_comparable(file, "standard").is_empty()


def test_the_runs_that_come_with_the_lab_have_the_settings_of_today():
    kept = [read_comparable(ATLAS, scale) for scale in SCALES]
    assert sum(map(len, kept)) == len(read_table(ATLAS)) > 0


def test_bad_names_and_options_are_one_line():
    with pytest.raises(ValueError, match=r"mixer=.?gdm.?: .*gdn"):
        Candidate.of("gdm")
    with pytest.raises(ValueError, match="option=negative: must be NAME=VALUE"):
        Candidate.of("gdn", ["negative"])
    with pytest.raises(ValueError, match="must be in a module"):
        lab.profile(type("Mine", (nn.Module,), {"__module__": "__main__"}))


@pytest.fixture
def tiny(monkeypatch):
    spent = replace(SCALES["quick"], tokens=3 * profile.STEP_TOKENS, abilities=("recall", "copy"))
    monkeypatch.setitem(SCALES, "quick", spent)
    short = {"seq_len": 64, "vocab_size": 68}
    recall = replace(ABILITIES["recall"], options=short, lengths=(16, 32, 64))
    monkeypatch.setitem(ABILITIES, "recall", recall)
    monkeypatch.setattr(profile, "TEST_ROWS", 16)
    monkeypatch.setattr("lab.api.profiling.LENGTHS", (16, 32))


class Last(nn.Module):
    """Each position gets a map of itself alone: it can recall nothing."""

    def __init__(self, d_model: int, *, gain: float = 1.0):
        super().__init__()
        self.value, self.gain = nn.Linear(d_model, d_model), gain

    def forward(self, x):
        return self.gain * self.value(x)


class Leaking(Last):
    """Each position gets the mean of all, later ones too."""

    def forward(self, x):
        return self.value(x).mean(1, keepdim=True) + torch.zeros_like(x)


def test_a_profile_from_the_first_run_to_the_card(tiny, tmp_path):
    own = f"{__name__}:Last"
    options = ProfileOptions(
        what=own, options=("gain=2",), scale="quick", against=("gdn",), out=tmp_path, workers=1
    )
    with pytest.raises(RunError, match="none was run"):
        make_profile(replace(options, show=True))
    found = make_profile(options)
    card, told = found.card, json.loads(found.page.with_suffix(".json").read_text())
    assert [score["ability"] for score in told["abilities"]] == ["recall", "copy"]
    assert told["mixer"] == f"{own} gain=2"
    assert {law["law"]: law["verdict"] for law in told["laws"]}["causal"] == "holds"
    assert [cost["name"] for cost in told["costs"]] == [card.mixer, "attention"] * 2
    assert told["state_bytes"] is None  # it has no step
    page = found.page.read_text()
    assert "Recall by stored pairs" in page
    assert "To paste into a paper" in page
    assert card.to_markdown().startswith(f"| ability | {own} gain=2 |")
    assert r"$<$ 4 pairs" in card.to_latex()
    again = make_profile(replace(options, show=True)).card
    assert [score.level for score in again.scores] == [score.level for score in card.scores]


def test_a_mixer_that_sees_later_tokens_is_refused(tiny, tmp_path):
    options = ProfileOptions(what=f"{__name__}:Leaking", scale="quick", out=tmp_path, workers=1)
    with pytest.raises(RunError, match=r"no run of .*Leaking has a result: .*causal"):
        make_profile(options)
    assert not list(tmp_path.glob("*.html"))
