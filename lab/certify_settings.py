"""The options of `certify`, defined once for the function, the command and the laws.

Nothing here imports torch, so `lab certify` can validate its options before it starts a process.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

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
Input = Literal["hidden", "tokens"]
Layout = Literal["btd", "tbd", "bdt"]


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a factory from NAME=VALUE; a value is a Python literal or text.

    Raises:
        ValueError: for text of another form.
    """
    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"option={text}: must look like d_model=16")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return the whole numbers in "7,64,200".

    Raises:
        ValueError: for other text.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"lengths={text}: must be whole numbers, e.g. 7,64,200") from None


def parse_output(text: str) -> int | str:
    """Return the index or the name of an output."""
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True)
class CertifySettings:
    """What to try a module on, how to call it, and how much that may cost.

    The first fields are options of `lab certify`, whose help says what they are; None stands for
    the default that it names, except that without a `compiler` "forms agree" is not decided.

    Attributes:
        conditions: weights and modes under which laws that hold for any weights are tried.
        max_len: tokens after which "stable" stops.
        rounding_len: tokens of the input on which "precision" measures rounding errors; errors of
            angles and running sums show late.
        seconds: time that a law may take under one condition, above 0; a law says what it had no
            time for.
        longer: further lengths, tried with fewer trials while there is time; the first in any case.
            None takes those of `lab.laws.probes`, unless `lengths` are given.

    Raises:
        ValueError: for a number below its bound, an unknown choice, or an empty list of lengths.
    """

    d_model: int | None = option(None, "Width of the module's inputs.", TRIED)
    lengths: Sequence[int] | None = option(
        None,
        "Sequence lengths to try; those that the module refuses are left out.",
        "1 to 130, and around the module's chunks",
        metavar="7,64,200",
        read=parse_lengths,
    )
    batch: int = option(3, "Number of rows of each input.")
    seed: int = option(0, "Seed of weights and inputs.")
    options: Mapping[str, Any] | None = option(
        None,
        "An argument of the factory; may be repeated.",
        flag="--option",
        metavar="NAME=VALUE",
        read=parse_options,
    )
    input: Input | None = option(
        None, "What the module reads: vectors (hidden) or token ids.", TRIED
    )
    vocab_size: int | None = option(
        None, "Size of the vocabulary, if the module reads tokens.", TRIED
    )
    layout: Layout | None = option(None, "Order of the axes of inputs and outputs.", TRIED)
    output: str | int | None = option(
        None,
        "Which output holds the sequence.",
        "the first",
        metavar="NAME|INDEX",
        read=parse_output,
    )
    relative: bool | None = option(
        None,
        "Whether outputs should depend only on differences of positions.",
        "recognised by class",
        flag="--relative/--absolute",
    )
    only: Sequence[str] | None = option(None, "Try only this law; repeat for more.", metavar="LAW")
    compiler: Literal["aot_eager", "inductor", "none"] | None = option(
        None, "Backend of torch.compile.", "aot_eager; none with --quick"
    )
    device: str = option("cpu", "auto, cpu, cuda or cuda:N.")
    conditions: tuple[Condition, ...] = option(CONDITIONS, "", flag="")
    max_len: int = option(65_536, "", flag="")
    rounding_len: int = option(1024, "", flag="")
    seconds: int | float = option(5.0, "", flag="")
    longer: Sequence[int] | None = option(None, "", flag="")

    def __post_init__(self) -> None:
        for name, choices in (("input", Input), ("layout", Layout)):
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), get_args(choices))
        for name in ("d_model", "vocab_size", "batch", "max_len", "rounding_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
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
