"""What a law is: a name, the function that judges it, and the conditions it is tried under."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lab.certify_settings import Condition
from lab.laws.probes import Probes
from lab.laws.verdict import Verdict


@dataclass(frozen=True)
class Law:
    """A property that every causal model must have.

    Attributes:
        name: stands in its verdicts.
        judge: tries a module from [b t d] to [b t …] on probes and returns a verdict.
        conditions: "first", the first condition only, for laws that measure numbers or vary the
            weights themselves; "evaluating", all conditions in evaluation mode; "all", for laws
            that hold in training as well.
        seeded: whether random numbers that the module draws are fixed by a seed during the trial.
    """

    name: str
    judge: Callable[[nn.Module, Probes], Verdict]
    conditions: Literal["first", "evaluating", "all"] = "first"
    seeded: bool = True

    def select(self, conditions: Sequence[Condition]) -> list[Condition]:
        """Return those of a module's conditions that this law is tried under."""
        if self.conditions == "first":
            return [conditions[0]]
        return [c for c in conditions if self.conditions == "all" or not c.training]
