"""How a foreign module is to be called, where that is known beforehand."""

from dataclasses import dataclass

from tasks.bounds import check_choice

INPUTS = ("hidden", "tokens")
LAYOUTS = ("btd", "tbd", "bdt")


@dataclass(frozen=True)
class AdapterOptions:
    """What the user says about a module's interface; None is found out by trying.

    Attributes:
        input: what the module reads, "hidden" [b t d] or "tokens" [b t]; None tries both.
        d_model: width d; None tries widths that the module names, and those of its weights.
        vocab_size: size of the vocabulary of a module that reads tokens; None looks for it.
        layout: order of its axes, "btd", "tbd" or "bdt"; None goes by `batch_first`, then tries.
        output: which item of a tuple or field of an object is the sequence; None takes the first.
        relative: whether the module claims that only differences of positions count; None goes by
            what is recognised.

    Raises:
        ValueError: for an option that is not among its values, or a size below 1.
    """

    input: str | None = None
    d_model: int | None = None
    vocab_size: int | None = None
    layout: str | None = None
    output: str | int | None = None
    relative: bool | None = None

    def __post_init__(self) -> None:
        for name, known in (("input", INPUTS), ("layout", LAYOUTS)):
            value = getattr(self, name)
            if value is not None:
                check_choice(name, value, known)
        for name in ("d_model", "vocab_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
