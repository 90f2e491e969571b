"""Typeset mathematics: known formulas in plain text become MathML, which browsers draw."""

import re
from functools import cache

from latex2mathml.converter import convert
from markupsafe import Markup, escape

FORMULAS = {
    "⟨|M|, P⟩ / Σ|M|": r"\frac{\langle |M|, P \rangle}{\sum |M|}",
    "Σ|M|(i − j) / Σ|M|": r"\frac{\sum_{ij} |M_{ij}| (i - j)}{\sum_{ij} |M_{ij}|}",
    "Σ_j |M_ij|": r"\textstyle\sum_j |M_{ij}|",
    "Σ_j |M̃_ij|": r"\textstyle\sum_j |\tilde{M}_{ij}|",
    "‖M_ij v_j W_O‖": r"\| M_{ij} v_j W_O \|",
    "‖dt·B⊗x‖": r"\| dt \cdot B \otimes x \|",
    "‖h C‖": r"\| h C \|",
    "exp H(σ / Σσ)": r"\exp H(\sigma / \textstyle\sum \sigma)",
    "σ_max · max(m, T − m) · ε": r"\sigma_{\max} \cdot \max(m, T - m) \cdot \varepsilon",
    "Π (½ I + ½ Ā)": r"\textstyle\prod (\frac{1}{2} I + \frac{1}{2} \bar{A})",
    "M̃ = L∘CBᵀ·dt + D": r"\tilde{M} = L \circ C B^\top \cdot dt + D",
    "M = L ∘ CBᵀ": r"M = L \circ C B^\top",
    "log₁₀|M̃|": r"\log_{10} |\tilde{M}|",
    "log|M_ij|": r"\log |M_{ij}|",
    "log|C_i·B_j|": r"\log |C_i \cdot B_j|",
    "log L_ij": r"\log L_{ij}",
    "log₂(step + 1)": r"\log_2(\mathrm{step} + 1)",
    "y = M · values": r"y = M \cdot \mathrm{values}",
    "I(row; column)": r"I(\mathrm{row}; \mathrm{column})",
    "exp Σa": r"\exp \textstyle\sum a",
    "e^H": "e^H",
    "e^a": "e^a",
    "R_ij": "R_{ij}",
    "M_ij": "M_{ij}",
    "|M|": "|M|",
}
"""LaTeX of the formulas that sentences and titles of analyses contain, by their plain text."""

KNOWN = re.compile("|".join(re.escape(plain) for plain in sorted(FORMULAS, key=len, reverse=True)))


def typeset(text: str) -> Markup:
    """Return a text as HTML: escaped, formulas as MathML, numbers together with their %."""
    parts = KNOWN.split(text)
    found = [*map(_convert, KNOWN.findall(text)), Markup("")]
    words = (escape(part.replace(" %", "\N{NO-BREAK SPACE}%")) for part in parts)
    return Markup("").join(part for pair in zip(words, found, strict=True) for part in pair)


@cache
def _convert(plain: str) -> Markup:
    return Markup(convert(FORMULAS[plain]))
