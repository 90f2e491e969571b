"""The settings of `certify`, defined and validated once for the function, the command and laws.

Nothing here imports torch, so `lab certify` can validate its options before it starts a process.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

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


@dataclass(frozen=True)
class CertifySettings:
    """What to try a module on, and how much that may cost.

    Attributes:
        d_model: width d of the inputs; None finds it by trying.
        lengths: sequence lengths t of the probes; None takes `lab.laws.probes.LENGTHS` and those
            around the module's own chunks. Lengths that the module refuses are left out.
        batch: rows b of a probe.
        seed: of weights and probes, added to each condition's own.
        options: keyword arguments of the factory.
        calling: how to call the module, where that cannot be found by trying: the fields of
            `lab.laws.adapters.adaptation.AdapterOptions`.
        conditions: weights and modes under which laws that hold for any weights are tried.
        max_len: tokens after which "stable" stops.
        rounding_len: tokens of the input on which "precision" measures rounding errors; errors of
            angles and running sums show late.
        seconds: time that a law may take under one condition, above 0; a law says what it had no
            time for.
        compiler: torch.compile's backend for "forms agree", "inductor" or "aot_eager"; compiling
            takes seconds, so None leaves that law undecided.
        device: name of the device to try the module on.
        longer: further lengths, tried with fewer trials while there is time; the first in any case.
            None takes those of `lab.laws.probes`, unless `lengths` are given.

    Raises:
        ValueError: for a number below its bound, or an empty list of lengths.
    """

    d_model: int | None = None
    lengths: Sequence[int] | None = None
    batch: int = 3
    seed: int = 0
    _: KW_ONLY
    options: Mapping[str, Any] | None = None
    calling: Mapping[str, Any] | None = None
    conditions: tuple[Condition, ...] = CONDITIONS
    max_len: int = 65_536
    rounding_len: int = 1024
    seconds: int | float = 5.0
    compiler: str | None = None
    device: str = "cpu"
    longer: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("d_model", "batch", "max_len", "rounding_len"):
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
