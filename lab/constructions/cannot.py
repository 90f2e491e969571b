"""The error of a construction that is impossible, or that nobody has built."""

from typing import Literal


class CannotError(ValueError):
    """There is no construction: the model cannot solve the task, or nobody has built one for it.

    Attributes:
        reason: one clause, without the outcome.
        proven: whether the reason holds for all weights. False where it holds for this construction
            only, so that another one might work.
    """

    def __init__(self, reason: str, *, proven: bool = False):
        said = (
            "no weights solve the task in this model"
            if proven
            else "no weights set by hand are known for this model"
        )
        super().__init__(f"{said}: {reason}")
        self.reason = reason
        self.proven = proven

    @property
    def outcome(self) -> Literal["cannot", "not built"]:
        """What the reason holds for: all weights ("cannot"), or this construction ("not built")."""
        return "cannot" if self.proven else "not built"
