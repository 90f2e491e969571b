"""The list of laws. A new law is a file that defines `LAW`, and its line here."""

from lab.laws import (
    batch,
    causal,
    decoding,
    derivative,
    forms,
    gradient,
    matrix,
    padding,
    precision,
    relative_positions,
    repeatable,
    stable,
    tables,
)
from lab.laws.law import Law

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        repeatable.LAW,
        causal.LAW,
        batch.LAW,
        decoding.LAW,
        relative_positions.LAW,
        padding.LAW,
        gradient.LAW,
        derivative.LAW,
        tables.LAW,
        forms.LAW,
        matrix.LAW,
        precision.LAW,
        stable.LAW,
    )
}
"""Every law by name, in the order in which they are tried."""
