"""What is a mixer good at? A model with it is trained on each of several abilities.

Every mixer gets two layers of it with MLPs, the same width, the same tokens of training and the
same seeds. Its learning rate is the one of three that recalls best on validation rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lab.config import get_protocol_defaults
from lab.models.mixers import MIXERS
from lab.sweeps.sweep import Cell, Sweep
from tasks.bounds import check_choice

Measure = Literal["share", "reach", "bits"]
"""share: of the answers, 0 being chance. reach: the size of a row at which this share is a half.
bits: of facts that a parameter holds."""
WIDTH = 64
STEP_TOKENS = 2_048
"""Tokens a step: few, so that a small budget has many steps."""
RATES = {"lab": 1.0, "half": 0.5, "double": 2.0}
"""Learning rates that are tried, as multiples of the lab's own, which depends on the task."""
CHOOSER = "recall"
"""The ability whose validation rows choose the learning rate, of the first seed."""
TEST_ROWS = 256
LENGTHEN_AT = 0.9
STAGES = 3
"""A row length that is not learned takes at most one part in so many of the budget; then rows
grow."""


@dataclass(frozen=True)
class Ability:
    """Something that a mixer can be good at.

    Attributes:
        title: in a few words.
        asks: what its number is, as a clause.
        task: on which a model is trained.
        options: of the task.
        lengths: row lengths at which the model is evaluated; `seq_len` of them is trained on, and
            shorter ones on the way there.
        measure: how the accuracies at these lengths become one number.
        unit: in which a reach is said.
        unit_tokens: tokens of a row for one of them.
        floor: a shortcut of the task that stands in for chance; "" for chance itself.
    """

    title: str
    asks: str
    task: str
    options: Mapping[str, Any]
    lengths: tuple[int, ...]
    measure: Measure
    unit: str = "tokens"
    unit_tokens: int = 1
    floor: str = ""

    @property
    def unit_of_value(self) -> str:
        """In which its number is said; "" for a share, which is said in per cent."""
        return "" if self.measure == "share" else self.unit


@dataclass(frozen=True)
class Scale:
    """How much is spent on a profile.

    Attributes:
        tokens: of training on each ability.
        seeds: runs of each ability.
        abilities: which are measured.
    """

    tokens: int
    seeds: int
    abilities: tuple[str, ...]


ABILITIES = {
    "recall": Ability(
        "Recall",
        "stored pairs at which half of them are recalled",
        "mqar",
        {"seq_len": 1024, "vocab_size": 1028},
        (16, 32, 64, 128, 256, 512, 1024),
        "reach",
        "pairs",
        unit_tokens=4,
    ),
    "overwrite": Ability(
        "Overwriting",
        "latest values of keys that were rewritten three times",
        "overwrite",
        {"seq_len": 64, "n_pairs": 4, "vocab_size": 64},
        (64,),
        "share",
    ),
    "copy": Ability(
        "Copying",
        "row length up to which half of a copied string is right; trained to 32",
        "copy",
        {"seq_len": 32, "vocab_size": 64},
        (32, 64, 128),
        "reach",
    ),
    "induction": Ability(
        "Induction",
        "row length up to which half of the triggers are found again; trained to 64",
        "induction",
        {"seq_len": 64, "vocab_size": 16},
        (64, 128, 256, 512, 1024),
        "reach",
    ),
    "parity": Ability(
        "Parity",
        "bits of which half of the parities are known; trained to 32",
        "word_problem",
        {"group": "Z2", "seq_len": 32},
        (4, 8, 16, 32, 64, 128),
        "reach",
        "bits",
    ),
    "permutations": Ability(
        "Permutations of five",
        "permutations of which half of the products are known; trained to 32",
        "word_problem",
        {"group": "S5", "seq_len": 32},
        (4, 8, 16, 32, 64),
        "reach",
        "permutations",
    ),
    "selective_copy": Ability(
        "Selective copying",
        "tokens among blanks that are repeated in order",
        "selective_copy",
        {"seq_len": 64, "n_tokens": 8, "vocab_size": 10},
        (64,),
        "share",
    ),
    "hops": Ability(
        "Two hops",
        "ends of chains of two links",
        "hops",
        {"seq_len": 29, "n_pairs": 7, "vocab_size": 24},
        (29,),
        "share",
    ),
    "noise": Ability(
        "Noise",
        "row length up to which half of eight pairs are recalled among noise; trained to 64",
        "mqar",
        {"seq_len": 64, "n_pairs": 8, "vocab_size": 1026, "fillers": "fresh"},
        (64, 128, 256, 512, 1024),
        "reach",
    ),
    "language": Ability(
        "Language in context",
        "share of the way from a trigram to the best prediction, in strings of a new automaton",
        "language",
        {"seq_len": 128, "max_states": 6, "n_symbols": 8, "max_length": 12},
        (128,),
        "share",
        floor="trigram",
    ),
    "storage": Ability(
        "Storage",
        "bits of facts that a parameter holds",
        "memorize",
        {"seq_len": 48, "n_facts": 4096, "vocab_size": 64},
        (48,),
        "bits",
        "bits a parameter",
    ),
}
"""What is measured, the most telling first. Tasks and sizes are such that mixers differ: each is
learned by some, and no reach is as long for all."""
SCALES = {
    "quick": Scale(2_000_000, 1, ("recall", "overwrite", "copy", "induction", "parity")),
    "standard": Scale(4_000_000, 3, tuple(ABILITIES)),
    "full": Scale(16_000_000, 5, tuple(ABILITIES)),
}


@dataclass(frozen=True)
class Candidate:
    """A mixer that is profiled.

    Attributes:
        name: its word or MODULE:CLASS, with the options that differ from its defaults.
        model: the options of `lab TASK` that put two layers of it into a model.
    """

    name: str
    model: Mapping[str, Any]

    @classmethod
    def of(cls, what: str, options: Sequence[str] = ()) -> "Candidate":
        """Return the candidate of a mixer.

        Args:
            what: a word of `lab mixers`, or MODULE:CLASS.
            options: of the mixer, each "NAME=VALUE".

        Raises:
            ValueError: for an unknown word, or an option of another form.
        """
        own = ":" in what
        if not own:
            check_choice("mixer", what, MIXERS)
        for text in options:
            if not text.partition("=")[1] or "." in text.partition("=")[0]:
                raise ValueError(f"option={text}: must be NAME=VALUE, an option of {what}")
        model: dict[str, Any] = {"stack": f"{'U' if own else what + '+'}M*2", "d_model": WIDTH}
        if own:
            model["model"] = what
        if options:
            model["options"] = [f"{'U' if own else what}.{text}" for text in options]
        return cls(" ".join((what, *options)), model)

    @classmethod
    def from_name(cls, name: str) -> "Candidate":
        """Return the candidate of this name.

        Raises:
            ValueError: as `of`.
        """
        what, *options = name.split()
        return cls.of(what, options)


def build_study(
    candidates: Sequence[Candidate],
    scale: str,
    *,
    abilities: Sequence[str] = (),
    rates: Mapping[str, Sequence[str]] | None = None,
    seeds: Sequence[int] = (),
) -> Sweep:
    """Return the runs of some mixers at a scale.

    Args:
        candidates: the mixers.
        scale: of `SCALES`.
        abilities: of `ABILITIES`; none: those of the scale.
        rates: names of learning rates by the mixer's; None: all of `RATES` for all.
        seeds: of the runs; none: those of the scale.
    """
    spent = SCALES[scale]
    return Sweep(
        "profile",
        "What is each mixer good at?",
        tuple(
            build_cell(each, scale, ability, rate, seed)
            for seed in seeds or range(spent.seeds)
            for each in candidates
            for ability in abilities or spent.abilities
            for rate in (rates[each.name] if rates is not None else RATES)
        ),
    )


def build_cell(candidate: Candidate, scale: str, key: str, rate: str, seed: int) -> Cell:
    """Return the run of a mixer at a scale that learns an ability."""
    ability, steps = ABILITIES[key], SCALES[scale].tokens // STEP_TOKENS
    length, vocab_size = ability.options["seq_len"], ability.options.get("vocab_size", 256)
    usual = get_protocol_defaults("lab", length, vocab_size, WIDTH)["learning_rate"]
    training = {
        "batch_size": STEP_TOKENS // length,
        "max_steps": steps,
        "stage_steps": steps // STAGES,
        "unlearned": "lengthen",
        "lengthen_at": LENGTHEN_AT,
        "test_rows": TEST_ROWS,
        "precision": "fp32",
        "learning_rate": RATES[rate] * usual,
        "seed": seed,
    }
    factors = {
        "mixer": candidate.name,
        "scale": scale,
        "ability": key,
        "learning_rate": rate,
        "seed": seed,
    }
    options = {**ability.options, **candidate.model, **training}
    return Cell(factors, ability.task, options, ability.lengths)
