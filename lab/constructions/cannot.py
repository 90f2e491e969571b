"""The refusal of the oracles: what cannot be, and what has not been built."""

from typing import Literal


class CannotError(ValueError):
    """No weights were set: a model of this configuration cannot solve the task, or nobody built it.

    Attributes:
        reason: one sentence, without the verdict.
        proven: whether the reason holds for every setting of the weights; False where it is of
            this construction alone, and another might do.
    """

    def __init__(self, reason: str, *, proven: bool = False):
        said = (
            "no weights solve the task in this model"
            if proven
            else "weights set by hand, not built"
        )
        super().__init__(f"{said}: {reason}")
        self.reason = reason
        self.proven = proven

    @property
    def verdict(self) -> Literal["cannot", "not built"]:
        """The reason's weight in two words."""
        return "cannot" if self.proven else "not built"
