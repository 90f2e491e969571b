"""Formulas become MathML; the rest of a text is escaped as it is."""

import re
from pathlib import Path
from xml.etree import ElementTree

import analysis
from analysis.pages.formulas import FORMULAS, typeset
from lab import layers


def test_formulas_become_mathml_and_the_rest_is_escaped():
    text = typeset("A share of Σ_j |M_ij| is 5 % <b> of |M|")
    assert text.startswith("A share of <math")
    assert text.count("</math>") == 2
    assert " is 5\N{NO-BREAK SPACE}% &lt;b&gt; of <math" in text
    assert typeset("no formula & no tag") == "no formula &amp; no tag"


def test_every_formula_is_well_formed_and_in_use():
    paths = [
        *Path(analysis.__file__).parent.rglob("*.py"),
        *Path(layers.__file__).parent.glob("*.py"),
    ]
    written = "".join(path.read_text() for path in paths if path.name != "formulas.py")
    written = re.sub(r'"\s*\n\s*f?"', "", written)
    for plain in FORMULAS:
        assert plain in written
        ElementTree.fromstring(typeset(plain))
