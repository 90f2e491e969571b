"""The options of `certify`, defined once for the function, the command and the laws.

Nothing here imports torch, so `lab certify` can validate its options before it starts a process.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tasks.bounds import check_choice, option

Weights = Literal["as built", "moved", "larger"]


@dataclass(frozen=True)
class Condition:
    """The weights and the mode that a module is tried with: either can hide a fault.

    Attributes:
        seed: of the weights, where the module can be built anew, and of the probes.
        weights: "as built"; "moved", with noise on what was constant; "larger", matrices times 3.
        training: True for training mode, False for evaluation mode.
    """

    seed: int
    weights: Weights
    training: bool

    def __str__(self) -> str:
        mode = "training" if self.training else "evaluating"
        return f"seed {self.seed}, weights {self.weights}, {mode}"


CONDITIONS = (
    Condition(0, "as built", False),
    Condition(1, "moved", False),
    Condition(2, "larger", False),
    Condition(3, "moved", True),
)
"""The default conditions; laws that are tried under one condition only take the first."""

TRIED = "found by trying"
CHOICES = {"input": ("hidden", "tokens"), "layout": ("btd", "tbd", "bdt")}
LEAST = {
    **dict.fromkeys(("d_model", "vocab_size", "batch", "max_len", "rounding_len"), 1),
    "memory": 1,  # Python and torch need a quarter of it
}
"""Smallest values of options that are numbers."""


@dataclass(frozen=True)
class CertifySettings:
    """What to try a module on, how to call it, and how much that may cost.

    Each field's help says what it is. Fields of which the help is empty are not options of the
    command: the conditions under which laws that hold for any weights are tried; the tokens after
    which "stable" stops; the length on which "precision" measures rounding errors, since errors of
    angles and running sums show late; the time that a law may take under one condition, where a law
    says what it had no time for; and further lengths, tried with fewer trials while there is time,
    the first in any case (None: those of `lab.laws.probes`, unless `lengths` are given).

    Raises:
        ValueError: for a number below its bound, an unknown choice, or an empty list of lengths.
    """

    d_model: int | None = option(None, "width of the module's inputs [b t d]", TRIED)
    lengths: Sequence[int] | None = option(
        None,
        "sequence lengths to try; those that the module refuses are left out",
        "1 to 130, and around the module's chunks",
    )
    batch: int = option(3, "number of rows of each input")
    seed: int = option(0, "seed of weights and inputs, added to each condition's own")
    options: Mapping[str, Any] | None = option(None, "arguments of the factory")
    input: str | None = option(
        None, "what the module reads: vectors (hidden) or token ids (tokens)", TRIED
    )
    vocab_size: int | None = option(
        None, "size of the vocabulary, if the module reads tokens", TRIED
    )
    layout: str | None = option(
        None, "order of the axes of inputs and outputs: btd, tbd or bdt", TRIED
    )
    output: str | int | None = option(
        None, "which item or field of what it returns holds the sequence", "the first"
    )
    relative: bool | None = option(
        None,
        "whether outputs should depend only on differences of positions",
        "recognised by class",
    )
    only: Sequence[str] | None = option(None, "names of the laws to try", "all")
    compiler: str | None = option(
        None, "backend of torch.compile for “forms agree”, which is not decided without", "none"
    )
    device: str = option("cpu", "device to try the module on")
    conditions: tuple[Condition, ...] = option(CONDITIONS, "")
    max_len: int = option(65_536, "")
    rounding_len: int = option(1024, "")
    seconds: int | float = option(5.0, "")
    longer: Sequence[int] | None = option(None, "")

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), known)
        for name, least in LEAST.items():
            value = getattr(self, name, None)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if self.lengths is not None and min(self.lengths, default=0) < 1:
            raise ValueError(f"lengths={tuple(self.lengths)}: give one or more, each at least 1")
        if min(self.longer or (), default=1) < 1:
            raise ValueError(f"longer={tuple(self.longer or ())}: each must be at least 1")
        # Far below torch's own bound, because conditions and probes add to it.
        if not 0 <= self.seed < 2**62:
            raise ValueError(f"seed={self.seed} must be in 0 … 2⁶² − 1")
        if not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds} must be above 0")

    def list_calling(self) -> dict[str, Any]:
        """Return the options that say how to call the module, by name."""
        names = ("d_model", "input", "vocab_size", "layout", "output", "relative")
        return {name: getattr(self, name) for name in names}


QUICK = CertifySettings(
    lengths=(1, 2, 7, 33),
    conditions=CONDITIONS[:2],
    max_len=4096,
    rounding_len=256,
    seconds=0.3,
)
"""Settings for a certificate in about five seconds: no larger weights and no training mode."""

BEFORE_TRAINING = CertifySettings(
    lengths=(2, 7, 33),
    batch=2,
    conditions=(CONDITIONS[0], CONDITIONS[3]),
    seconds=1.0,
)
"""Settings for the laws that a training relies on, in about one second for a small layer."""

THOROUGH = CertifySettings(
    conditions=(*CONDITIONS, *(Condition(n, "moved", False) for n in (4, 5))),
    rounding_len=4160,
    seconds=60.0,
)
"""Settings for a certificate in minutes: longer inputs, more seeds."""


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a factory from NAME=VALUE; a value is a Python literal or text.

    Raises:
        ValueError: for text of another form.
    """
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{text!r} must look like d_model=16")
        options[name] = read_value(value)
    return options


def read_value(text: str) -> Any:
    """Return a Python literal; other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
