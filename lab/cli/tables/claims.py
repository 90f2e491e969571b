"""The list of claims, for the terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from analysis.claims.claim import Claim


def build_claims_list(claims: Sequence[Claim]) -> Group:
    """Return a line for each claim with its name and scales, and below it what it says."""
    parts: list[RenderableType] = []
    for claim in claims:
        parts.append(Text.assemble((claim.name, "bold"), f" ({', '.join(claim.sweeps)})"))
        parts.append(Padding(Text(claim.says), (0, 0, 0, 4)))
    return Group(*parts)
