"""The list of laws. A new law is a `Law` in the file of its subject, and its line here."""

from collections.abc import Collection

from lab.laws import (
    agreement,
    causal,
    decoding,
    derivative,
    gradient,
    precision,
    relative_positions,
    stable,
    tables,
)
from lab.laws.law import Law
from tasks.bounds import check_choice

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        agreement.REPEATS,
        causal.LAW,
        agreement.BATCHES,
        decoding.DECODING,
        relative_positions.LAW,
        decoding.PADDING,
        gradient.LAW,
        derivative.LAW,
        derivative.TWICE,
        tables.LAW,
        agreement.FORMS,
        agreement.MATRIX,
        precision.LAW,
        stable.LAW,
    )
}
"""Every law by name, in the order in which they are tried."""


def select_laws(names: Collection[str] | None, field: str = "only") -> list[str]:
    """Return the laws asked for, in the order in which they are tried; None asks for all.

    Raises:
        ValueError: for an unknown law, lists the known ones; for text or an empty list. `field` is
            what the message calls the names.
    """
    if isinstance(names, str) or (names is not None and not names):
        raise ValueError(f"{field}={names!r}: must be a list of one or more laws, or None for all")
    for law in names or ():
        check_choice(field, law, LAWS)
    return [law for law in LAWS if names is None or law in names]
