"""A claim: what it says, where it is made, what would refute it, and the sweep that decides."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lab.bench.costs import Cost
from lab.files import read_toml_and_bytes
from tasks.bounds import check_choice
from tasks.near_names import suggest

SCALES = ("smoke", "small", "paper")
TEXTS = ("claim", "source", "refuted_by", "stands_for")
PARTS = (*TEXTS, "statistic", "equal", "power", "sweeps_of", *SCALES)
COUNTS = ("total", "active")
"""Parameters that settings can be held equal in: all, or those that one token uses."""
LOOKS, TUNING = "looks", "tuning_seeds"
"""Parts of a claim's sweep that other sweeps do not have."""
STATISTIC = ("kind", "of", "than", "at", "cost", "measure")
MEASURES = ("accuracy", "bits")
KINDS = ("difference", "least", "greatest", "ratio")
SIDES = ("above", "below")


@dataclass(frozen=True)
class Statistic:
    """What is computed of a table, and the threshold that decides.

    Attributes:
        kind: "difference": mean accuracy of one setting minus that of another; "least": the lowest
            mean accuracy over all places; "greatest": the highest; "ratio": how many times as much
            one setting costs as another.
        than: those of the setting that it is compared with; empty for least and greatest.
        threshold: in the unit of accuracy or in bits; of a ratio, a number > 0.
        at: values of further factors, to which the claim is restricted.
        cost: of a ratio, what is measured; otherwise empty.
        measure: of a difference: "accuracy", or "bits" that a token takes fewer.
    """

    kind: Literal["difference", "least", "greatest", "ratio"]
    of: Mapping[str, Any]
    than: Mapping[str, Any]
    side: Literal["above", "below"]
    threshold: float
    at: Mapping[str, Any]
    cost: Cost | Literal[""] = ""
    measure: Literal["accuracy", "bits"] = "accuracy"

    def __post_init__(self):
        check_choice("kind", self.kind, KINDS)
        if not self.of:
            raise ValueError("of: must name a setting, such as { d_model = 64 }")
        if self.of == self.than:
            raise ValueError("than: must differ from the setting in `of`")
        check_choice("measure", self.measure, MEASURES)
        if self.measure == "bits" and self.kind != "difference":
            raise ValueError(f"measure=bits: must be of a difference ({self.kind})")
        compares = self.kind in ("difference", "ratio")
        if compares != bool(self.than):
            raise ValueError(
                f"than: must be given for a difference or a ratio, and only there ({self.kind})"
            )
        if self.kind != "ratio":
            if self.cost:
                raise ValueError(f"cost={self.cost}: must be given for a ratio only ({self.kind})")
            if self.measure == "accuracy" and not -1 <= self.threshold <= 1:
                raise ValueError(f"{self.side}={self.threshold}: must be in -1 … 1")
            return
        check_choice("cost", self.cost, get_args(Cost))
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"{self.side}={self.threshold}: must be > 0 and finite for a ratio")


@dataclass(frozen=True)
class Power:
    """What is assumed to compute the power of a claim.

    Attributes:
        effect: the statistic, if the claim is true.
        spread: standard deviation over seeds of what the statistic compares.
    """

    effect: float
    spread: float

    def __post_init__(self):
        if not 0 < self.spread < math.inf:
            raise ValueError(f"power.spread={self.spread}: must be > 0")

    @classmethod
    def read(cls, content: Mapping[str, Any], statistic: Statistic) -> "Power":
        """Read it from the content of a claim's file; both are in the unit of its statistic."""
        assumed = _read_table(content, "power", ("effect", "spread"))
        found = cls(*(_read_number(assumed, key, "power.") for key in ("effect", "spread")))
        if statistic.measure == "accuracy":
            for name, value, least in (("effect", found.effect, -1), ("spread", found.spread, 0)):
                if not least <= value <= 1:
                    raise ValueError(f"power.{name}={value}: must be in {least} … 1")
        return found


@dataclass(frozen=True)
class Claim:
    """A claim, as its file states it.

    Attributes:
        stands_for: what the lab's task stands in for; empty where it is the claim's own.
        equal: by how large a share the settings compared may differ in total and in active
            parameters; what is not named may differ freely.
        power: what is assumed to compute its power; None for a claim about costs.
        sweeps: the sweep of each scale, as a sweep's file describes it, with `looks` in place of
            `seeds` if more of them are run while the claim is undecided, and `tuning_seeds` if
            only so many of them try all learning rates.
        digest: of the file's content, and of that of the file whose sweeps it has.
        sweeps_of: the claim whose sweeps and runs it shares; its own name if they are its own. Of
            another's, it runs only the settings that it compares.
    """

    name: str
    says: str
    source: str
    refuted_by: str
    stands_for: str
    statistic: Statistic
    equal: Mapping[str, float]
    power: Power | None
    sweeps: Mapping[str, Mapping[str, Any]]
    digest: str
    sweeps_of: str

    def list_looks(self, scale: str) -> tuple[int, ...]:
        """Return after how many seeds a verdict is sought, ascending; () for once, after all."""
        return tuple(self.sweeps.get(scale, {}).get(LOOKS, ()))

    def count_tuning_seeds(self, scale: str) -> int | None:
        """Return how many seeds try all learning rates; None: all of them."""
        return self.sweeps.get(scale, {}).get(TUNING)

    @classmethod
    def read(cls, file: Path) -> "Claim":
        """Read a claim's file.

        Raises:
            ValueError: for a file that cannot be read, or has unknown, missing or wrong parts.
        """
        content, data = read_toml_and_bytes(file)
        try:
            if "sweeps_of" in content:
                shared, sweeps = _load_sweeps(content, file)
                data, content = data + shared, content | sweeps
            return cls._parse(content, file.stem, hashlib.sha256(data).hexdigest())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def _parse(cls, content: Mapping[str, Any], name: str, digest: str) -> "Claim":
        _check_names("", content, PARTS)
        texts = {part: content.get(part, "") for part in TEXTS}
        for part, text in texts.items():
            if not isinstance(text, str) or (not text and part != "stands_for"):
                raise ValueError(f"{part}: must be a text, is {text!r}")
        given = _read_table(content, "statistic", (*STATISTIC, *SIDES))
        sides = [side for side in SIDES if side in given]
        if len(sides) != 1:
            raise ValueError("statistic: must have a threshold, either above or below")
        statistic = Statistic(
            kind=given.get("kind", ""),
            side=sides[0],  # type: ignore[arg-type]
            threshold=_read_number(given, sides[0], "statistic."),
            cost=given.get("cost", ""),
            measure=given.get("measure", "accuracy"),
            **{part: _read_table(given, part, where="statistic.") for part in ("of", "than", "at")},
        )
        given_equal = _read_table(content, "equal", COUNTS)
        equal = {count: _read_number(given_equal, count, "equal.") for count in given_equal}
        for count, share in equal.items():
            if not 0 <= share < 1:
                raise ValueError(f"equal.{count}={share}: must be in [0, 1)")
        if statistic.cost and content.get("power"):
            raise ValueError("power: is of accuracies; a claim about costs has none")
        sweeps = {scale: _read_table(content, scale) for scale in SCALES if scale in content}
        for scale, sweep in sweeps.items():
            _check_looks(sweep, scale)
            tuning = sweep.get(TUNING)
            if tuning is not None and (type(tuning) is not int or tuning < 1):
                raise ValueError(f"{scale}.{TUNING}={tuning!r}: must be a whole number ≥ 1")
            if statistic.cost and (parts := [part for part in (LOOKS, TUNING) if part in sweep]):
                raise ValueError(f"{scale}.{parts[0]}: a claim about costs has one seed")
        if not sweeps:
            raise ValueError(f"has no sweep: must have one of [{'], ['.join(SCALES)}]")
        return cls(
            name=name,
            says=texts["claim"],
            source=texts["source"],
            refuted_by=texts["refuted_by"],
            stands_for=texts["stands_for"],
            statistic=statistic,
            equal=equal,
            power=None if statistic.cost else Power.read(content, statistic),
            sweeps=sweeps,
            digest=digest,
            sweeps_of=content.get("sweeps_of", name),
        )


def _load_sweeps(content: Mapping[str, Any], file: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the content of the claim beside a file whose sweeps it has, and these sweeps."""
    name = content["sweeps_of"]
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"sweeps_of={name!r}: must be the name of a claim in the same folder")
    own = [scale for scale in SCALES if scale in content]
    if own:
        raise ValueError(f"sweeps_of={name}: has [{own[0]}] too: must have one of them")
    other, data = read_toml_and_bytes(file.with_name(f"{name}.toml"))
    return data, {scale: other[scale] for scale in SCALES if scale in other}


def _check_looks(sweep: Mapping[str, Any], scale: str) -> None:
    """Check that the looks of a sweep are numbers of seeds that grow, of a sweep without seeds."""
    looks = sweep.get(LOOKS)
    if looks is None:
        return
    if "seeds" in sweep:
        raise ValueError(f"{scale}.{LOOKS}={looks}: has seeds too: must have one of them")
    known = isinstance(looks, list) and all(type(look) is int and look > 1 for look in looks)
    if not known or not looks or looks != sorted({*looks}):
        raise ValueError(f"{scale}.{LOOKS}={looks}: must be whole numbers ≥ 2, ascending")


def _check_names(where: str, found: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in found:
        if name not in known:
            raise ValueError(f"unknown part {where}{name}. {suggest(name, known)}")


def _read_table(
    content: Mapping[str, Any], name: str, known: tuple[str, ...] | None = None, where: str = ""
) -> dict[str, Any]:
    found = content.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"{where}{name}: must be a table, is {found!r}")
    _check_names(f"{name}.", found, known or tuple(found))
    return found


def _read_number(content: Mapping[str, Any], name: str, where: str) -> float:
    found = content.get(name)
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise ValueError(f"{where}{name}: must be a number, is {found!r}")
    return float(found)
