"""What does it write? Texts continued by the model beside what they say, and bits a token."""

import math
import unicodedata
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from analysis.base import NotApplicableError, Passage, Subject, Words
from analysis.scoring import Scored, scored
from analysis.statistics.estimates import Estimate, estimate_ratio, sum_by_row
from analysis.statistics.intervals import bound_share
from analysis.words import percent
from tasks.base import Batch, Task

TITLE = "What does it write?"
PROMPTS = 3
PROMPT, ADDED = 128, 128
"""Most tokens of a prompt, and of what is added to it."""
SHORTEST = 4
"""Tokens of the shortest prompt that says anything."""
TEMPERATURE, TOP_K = 0.8, 40
LEGAL = "legal"
"""The link of a task whose rows are strings of an automaton: what may come next."""
PICTURES = 0x2400
"""Where Unicode has pictures of the control characters."""


@dataclass(frozen=True)
class Sample:
    """A text of the test split, and how the model goes on.

    Attributes:
        row: of the test split.
        prompt: what the model was given.
        text: what the text goes on with.
        greedy: the model's likeliest token each time.
        drawn: its draws at `TEMPERATURE` among the `TOP_K` likeliest.
    """

    row: int
    prompt: str
    text: str
    greedy: str
    fig: str


@dataclass(frozen=True)
class Legal:
    """What share of a model's answers is legal under the row's automaton.

    Attributes:
        share: that the automaton allows where they stand, drawn there or not, in [0, 1].
        interval: 95 % over rows.
        guess: the share that uniform answers would have.
    """

    share: float
    interval: tuple[float, float]
    guess: float


@dataclass(frozen=True)
class Written:
    """What a model makes of texts.

    Attributes:
        unit: what a token is.
        rows: of the test split.
        scored: tokens that are predicted.
        bits: mean cross-entropy a token, in bits, 95 % by resampling rows, uniform guess.
        perplexity: 2^bits likewise.
        samples: continuations.
        top_k: tokens among which they were drawn.
        legal: None for a task without automata.
        why: why there are no continuations; empty where there are.
    """

    unit: str
    rows: int
    scored: int
    bits: Estimate
    perplexity: Estimate
    samples: tuple[Sample, ...]
    top_k: int
    legal: Legal | None
    why: str = ""


@torch.no_grad()
def measure(subject: Subject) -> list[Written]:
    """Return bits a token, and continuations of a few rows.

    Raises:
        NotApplicableError: for a task whose rows settle their targets: it has answers, no text.
    """
    if not subject.task.stochastic:
        raise NotApplicableError("the task's rows are no text to be continued")
    found = scored(subject.model, subject.batch)
    guess = math.log2(subject.task.vocab_size)
    over = sum_by_row(found, found.losses / math.log(2))
    rng = np.random.default_rng(subject.seed)
    bits = estimate_ratio(*over, guess, rng)
    samples, why = (), ""
    try:
        samples = _continued(subject)
    except ValueError as error:  # a mixer that cannot decode, say
        why = str(error)
    return [
        Written(
            unit=subject.task.unit,
            rows=len(subject.batch.inputs),
            scored=len(found.rows),
            bits=bits,
            perplexity=Estimate(*(2.0**value for value in vars(bits).values())),
            samples=samples,
            top_k=min(TOP_K, subject.task.vocab_size),
            legal=legality(subject.batch, found, rng),
            why=why,
        )
    ]


def _continued(subject: Subject) -> tuple[Sample, ...]:
    """Let the model continue the first part of a few rows, by its likeliest tokens and drawn.

    Raises:
        ValueError: for a mixer that cannot decode.
    """
    batch, model, task = subject.batch, subject.model, subject.task
    at = min(PROMPT, batch.inputs.shape[1] // 2)
    if at < SHORTEST:
        raise ValueError(f"rows of {batch.inputs.shape[1]} are too short for a prompt")
    added = min(ADDED, batch.inputs.shape[1] - at)
    rows, top_k = batch.inputs[:PROMPTS], min(TOP_K, task.vocab_size)
    prompts = rows[:, :at]
    greedy = model.generate(prompts, added)[:, at:]
    fig = model.generate(prompts, added, temperature=TEMPERATURE, top_k=top_k, seed=subject.seed)[
        :, at:
    ]
    return tuple(
        Sample(
            row=row,
            prompt=spelt(task, rows[row, :at]),
            text=spelt(task, rows[row, at : at + added]),
            greedy=spelt(task, greedy[row]),
            fig=spelt(task, fig[row]),
        )
        for row in range(len(rows))
    )


def spelt(task: Task, tokens: Int[Tensor, " t"]) -> str:
    """Return tokens as text: bytes as UTF-8, control characters but line ends as pictures."""
    if task.unit != "byte":
        texts = [task.text(token) for token in tokens.tolist()]
        return ("" if max(map(len, texts)) == 1 else " ").join(texts)
    text = bytes(tokens.tolist()).decode("utf-8", "backslashreplace")
    # Nothing but blanks would look like nothing.
    return "".join(map(_visible, text)) if text.strip() else text.replace(" ", "␣")


def _visible(character: str) -> str:
    """Return a character that can be seen in its place."""
    if character in "\n\t" or not unicodedata.category(character).startswith("C"):
        return character
    code = ord(character)
    if code < 0x20:
        return chr(PICTURES + code)
    return chr(PICTURES + 0x21) if code == 0x7F else f"\\u{code:04x}"


def legality(batch: Batch, found: Scored, rng: np.random.Generator) -> Legal | None:
    """Return how many answers the row's automaton allows; None for a task that links none."""
    if LEGAL not in batch.links:
        return None
    allowed = batch.links[LEGAL][found.rows, found.positions]
    legal = (allowed == found.answers[:, None]).any(1).cpu().numpy()
    return Legal(
        share=float(legal.mean()),
        interval=bound_share(legal, found.rows.cpu().numpy(), rng),
        # Of all tokens but the separator.
        guess=float((allowed >= 0).double().sum(1).mean()) / (len(found.head) - 1),
    )


def describe(found: Written) -> Words:
    """Say what a token costs, and show the continuations."""
    bits, words = found.bits, found.perplexity
    title = f"Bits a {found.unit}, and continuations of the test split"
    says = (
        f"It takes {_number(bits.value)} bits a {found.unit}{_ends(bits)}, a perplexity of "
        f"{_number(words.value)}{_ends(words)}, beside {_number(bits.chance)} of a uniform guess."
    )
    if found.legal is not None:
        low, high = found.legal.interval
        says += (
            f" {percent(found.legal.share)} of its answers may come next by the row's automaton "
        )
        says += f"({percent(low)} to {percent(high)}); of uniform ones "
        says += f"{percent(found.legal.guess)} would."
    if found.why:
        says += f" There is nothing to read: {found.why}."
    reading = (
        f"{found.scored:,} {found.unit}s of {found.rows} test rows; intervals by resampling rows. "
        f"Drawn: at temperature {TEMPERATURE}, among the {found.top_k} likeliest."
    )
    if found.unit == "byte":
        reading += " Control characters stand as pictures, bytes that are no text as \\x."
    passages = tuple(
        Passage(
            f"Row {sample.row}",
            sample.prompt,
            {"the text": sample.text, "likeliest": sample.greedy, "drawn": sample.fig},
        )
        for sample in found.samples
    )
    return Words(title, says, reading, says, passages)


def _ends(of: Estimate) -> str:
    """Return an interval, where there is one."""
    return "" if math.isnan(of.low) else f" ({_number(of.low)} to {_number(of.high)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def draw(found: Written) -> None:
    """Draw nothing: it is to be read."""
    del found
