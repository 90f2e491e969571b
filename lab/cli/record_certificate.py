"""The certificate that a candidate for a record needs before it is trained."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.cli.output import check_output
from lab.files import explain_write_errors, has_entries, read_json, write_json

if TYPE_CHECKING:
    from lab.certification import Request
    from lab.training.run import Run

MUST_HOLD = ("deterministic", "causal", "batch-invariant")
"""Laws that must have been decided; of the others, none may fail."""
CERTIFIED_VOCABULARY = 256
"""Tokens of the model that is certified: the table and the head are the lab's own."""
CERTIFICATE = "certificate.json"


def describe_certification(run: "Run") -> "Request":
    """Return what `lab certify --quick` is asked to do with a run's model, of fewer tokens."""
    from lab.certification import Request
    from lab.certify_settings import QUICK
    from lab.cli.certify import SECONDS, choose_memory

    options = {**run.model.to_dict(), "vocab_size": CERTIFIED_VOCABULARY}
    settings = replace(
        QUICK,
        options=options,
        calling={"input": "tokens", "vocab_size": CERTIFIED_VOCABULARY},
    )
    return Request("lab.models:build", settings, None, choose_memory(None), SECONDS)


def certify_model(run: "Run", source: str | None, out: Path) -> str:
    """Return how many laws had which outcome for a run's model; kept in `out` for the next time.

    Raises:
        ValueError: for a model that cannot be tested, a law that fails, or one that must be decided
            and is not.
        RunError: when the certificate cannot be kept.
    """
    from analysis.claims.card import digest_code
    from lab.certification import RefusedError, certify_in_child, count_outcomes

    identity = [run.model.to_dict(), source, digest_code()]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    file = out / CERTIFICATE
    check_output("out", file, force=False, is_own=lambda file: has_entries(file, "key"))
    known = read_json(file, f"{file}: cannot be read; remove it") if file.exists() else {}
    if known.get("key") == key:
        return known["outcomes"]
    try:
        found = certify_in_child(describe_certification(run), _ignore, _ignore, _ignore)
    except RefusedError as error:
        raise ValueError(f"the model cannot be certified: {error}") from error
    _require_lawful(found)
    outcomes = count_outcomes(found)
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        write_json(file, {"key": key, "outcomes": outcomes, **found})
    return outcomes


def _ignore(*told: object) -> None:
    pass


def _require_lawful(certificate: Mapping[str, Any]) -> None:
    for law in certificate["laws"]:
        if law["verdict"] == "fails":
            why = law["counterexample"] or law["evidence"]
            raise ValueError(f"the model breaks the law “{law['law']}”: {why}")
    for law in certificate["laws"]:
        if law["law"] in MUST_HOLD and law["verdict"] != "holds":
            raise ValueError(
                f"the law “{law['law']}” must hold, is {law['verdict']}: {law['evidence']}"
            )
