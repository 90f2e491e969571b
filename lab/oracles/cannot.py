"""The refusal of the oracles: what cannot be, and what has not been built."""


class CannotError(ValueError):
    """No weights were set: a model of this configuration cannot solve the task, or nobody built it.

    Attributes:
        proven: whether the reason holds for every setting of the weights; False where it is of
            this construction alone, and another might do.
    """

    def __init__(self, reason: str, *, proven: bool = False):
        super().__init__(reason)
        self.proven = proven
