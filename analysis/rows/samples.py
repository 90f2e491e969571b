"""What does it write? Bits per token, and texts that the model continues."""

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from analysis.base import (
    Finding,
    NotApplicableError,
    Passage,
    Passages,
    Subject,
    Table,
)
from analysis.scoring import Scored, scored, sum_by_row
from analysis.words import percent, percents
from lab.intervals import Estimate, bound_share, estimate_ratio
from tasks.base import Batch, Task

__all__ = ["TITLE", "Continuations", "measure"]

TITLE = "What does it write?"
PROMPTS = 3
"""Rows that are continued."""
PROMPT, ADDED = 128, 128
"""Maximum number of tokens of a prompt, and of tokens that are added to it."""
SHORTEST = 4
"""Minimum number of tokens of a prompt."""
TEMPERATURE, TOP_K = 0.8, 40
"""Temperature of the sampled continuation, and how many of the likeliest tokens it draws from."""
LEGAL = "legal"
"""The link by which a task names the tokens that its automaton or grammar allows next."""
PICTURES = 0x2400
"""The code point at which Unicode's pictures of the control characters begin."""


@dataclass(frozen=True)
class Sample:
    """A text of the test split, and how the model continues it.

    Attributes:
        text: how the text really continues.
        greedy: the continuation by the likeliest token each time.
        drawn: the continuation sampled at `TEMPERATURE` among the `TOP_K` likeliest tokens.
    """

    row: int
    prompt: str
    text: str
    greedy: str
    drawn: str


@dataclass(frozen=True)
class Legal:
    """How many of the answers are legal in the row's language.

    Attributes:
        share: of answers that the language allows at their position, in [0, 1].
        guess: the share that uniform answers would have.
    """

    share: float
    interval: tuple[float, float]
    guess: float


@dataclass(frozen=True)
class Continuations(Finding):
    """How well a model predicts texts, and how it continues them.

    Attributes:
        bits: mean cross-entropy per token, in bits, with a 95 % interval over rows and the value
            of a uniform guess.
        perplexity: 2^bits, likewise.
        legal: None for a task without a language.
        why: why there are no continuations; empty where there are.
        references: bits a token that other predictors take at the same positions, by name.
    """

    unit: str
    rows: int
    scored: int
    bits: Estimate
    perplexity: Estimate
    samples: tuple[Sample, ...]
    legal: Legal | None
    why: str = ""
    references: Mapping[str, float] = field(default_factory=dict)

    title = "Bits per token, and continuations of the test split"
    reading = (
        "Intervals are bootstraps over rows. Sampled: at temperature "
        f"{TEMPERATURE} among the {TOP_K} likeliest tokens at most. Control characters of bytes "
        "appear as pictures, bytes that are not text as \\x."
    )

    @property
    def says(self) -> str:
        """How many bits a token takes."""
        why = f"; there are no continuations: {self.why}" if self.why else ""
        others = "".join(
            f", {name} {_format_number(bits)}" for name, bits in self.references.items()
        )
        return (
            f"A {self.unit} takes {_format_number(self.bits.value)} bits, a perplexity of "
            f"{_format_number(self.perplexity.value)}; a uniform guess takes "
            f"{_format_number(self.bits.chance)} bits{others}{why}."
        )

    def numbers(self) -> Table:
        """Return bits, perplexity and legal answers with intervals and a guess's values."""
        rows = [
            (name, _format_number(of.value), _format_ends(of), _format_number(of.chance))
            for name, of in ((f"bits per {self.unit}", self.bits), ("perplexity", self.perplexity))
        ]
        if self.legal is not None:
            share, low, high = percents(self.legal.share, *self.legal.interval)
            guess = percent(self.legal.guess)
            rows.append(
                ("answers that the row's language allows", share, f"{low} to {high}", guess)
            )
        measured = f"{self.scored:,} {self.unit}s in {self.rows} rows"
        return Table((measured, "", "95 %", "uniform guess"), tuple(rows))

    def figure(self) -> Passages | None:
        """Return the continuations to read."""
        texts = (
            Passage(
                f"Row {sample.row}",
                sample.prompt,
                {"the text": sample.text, "likeliest": sample.greedy, "sampled": sample.drawn},
            )
            for sample in self.samples
        )
        return Passages(tuple(texts)) if self.samples else None


@torch.no_grad()
def measure(subject: Subject) -> list[Continuations]:
    """Measure bits per token, and let the model continue a few rows.

    Raises:
        NotApplicableError: for a task whose inputs determine its targets.
    """
    if not subject.task.stochastic:
        raise NotApplicableError("the task's rows are not text that could be continued")
    found = scored(subject.model, subject.batch)
    guess = math.log2(subject.task.vocab_size)
    over = sum_by_row(found, found.losses / math.log(2))
    rng = np.random.default_rng(subject.seed)
    bits = estimate_ratio(*over, guess, rng)
    samples, why = (), ""
    try:
        samples = _continue_rows(subject)
    except ValueError as error:  # such as a mixer that cannot decode
        why = str(error)
    return [
        Continuations(
            unit=subject.task.unit,
            rows=len(subject.batch.inputs),
            scored=len(found.rows),
            bits=bits,
            perplexity=Estimate(*(2.0**value for value in vars(bits).values())),
            samples=samples,
            legal=measure_legality(subject.task, subject.batch, found, rng),
            why=why,
            references={
                name: float(find_bits(subject.batch)[subject.batch.scored].mean())
                for name, find_bits in subject.task.surprisals().items()
            },
        )
    ]


def _continue_rows(subject: Subject) -> tuple[Sample, ...]:
    """Let the model continue the first part of a few rows, greedily and by sampling.

    Raises:
        ValueError: for rows that are too short, or a mixer that cannot decode.
    """
    batch, model, task = subject.batch, subject.model, subject.task
    seq_len = batch.inputs.shape[1]
    at = min(PROMPT, seq_len // 2)
    if at < SHORTEST:
        raise ValueError(f"rows of {seq_len} are too short for a prompt")
    added = min(ADDED, seq_len - at)
    rows, top_k = batch.inputs[:PROMPTS], min(TOP_K, task.vocab_size)
    greedy = model.generate(rows[:, :at], added)[:, at:]
    drawn = model.generate(
        rows[:, :at], added, temperature=TEMPERATURE, top_k=top_k, seed=subject.seed
    )[:, at:]
    return tuple(
        Sample(
            row=row,
            prompt=spell(task, rows[row, :at]),
            text=spell(task, rows[row, at : at + added]),
            greedy=spell(task, greedy[row]),
            drawn=spell(task, drawn[row]),
        )
        for row in range(len(rows))
    )


def spell(task: Task, tokens: Int[Tensor, " t"]) -> str:
    """Return tokens as text; bytes are read as UTF-8, with pictures for control characters."""
    if task.unit != "byte":
        texts = [task.format_token(token) for token in tokens.tolist()]
        return ("" if max(map(len, texts)) == 1 else " ").join(texts)
    text = bytes(tokens.tolist()).decode("utf-8", "backslashreplace")
    # A text of nothing but blanks would look empty.
    return "".join(map(_make_visible, text)) if text.strip() else text.replace(" ", "␣")


def _make_visible(character: str) -> str:
    """Return a visible character in place of a control character; line ends and tabs stay."""
    if character in "\n\t" or not unicodedata.category(character).startswith("C"):
        return character
    code = ord(character)
    if code < 0x20:
        return chr(PICTURES + code)
    return chr(PICTURES + 0x21) if code == 0x7F else f"\\u{code:04x}"


def measure_legality(
    task: Task, batch: Batch, found: Scored, rng: np.random.Generator
) -> Legal | None:
    """Measure how many answers the row's language allows; None for a task without one."""
    if LEGAL not in batch.links:
        return None
    allowed = batch.links[LEGAL][found.rows, found.positions]
    legal = (allowed == found.answers[:, None]).any(1).cpu().numpy()
    return Legal(
        share=float(legal.mean()),
        interval=bound_share(legal, found.rows.cpu().numpy(), rng),
        guess=float((allowed >= 0).double().sum(1).mean()) * task.chance,
    )


def _format_ends(estimate: Estimate) -> str:
    """Return the ends of an interval; a dash where there is none."""
    ends = _format_number(estimate.low), _format_number(estimate.high)
    return "–" if math.isnan(estimate.low) else " to ".join(ends)


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
