"""The certificate of a run's layers: certificate.json in its folder, and its line of words."""

from typing import Any

from lab.files import RunError, explain_write_errors
from lab.folder import Folder, read_json, write_json
from lab.training.runs import Run

FILE = "certificate.json"


class UnlawfulError(RunError):
    """A layer breaks a law that training relies on; the message holds the counter-example."""


def write_certificate(run: Run, certificate: dict[str, Any]) -> None:
    """Write certificate.json into the run folder.

    Raises:
        RunError: when it cannot be written.
        UnlawfulError: when a law fails.
    """
    with explain_write_errors(run.path):
        write_json(run.path / FILE, certificate)
    if any(_list_failing(layer) for layer in certificate["layers"]):
        raise UnlawfulError(
            f"{describe_certificate(certificate)}. --no-certify trains it nevertheless"
        )


def read_certificate(run: Run) -> dict[str, Any] | None:
    """Return what certifying a run's layers found; None if they were not certified.

    Raises:
        RunError: when the file cannot be read.
    """
    if not Folder(run.path).exists(FILE):
        return None
    return read_json(run.path / FILE, f"{run.path} has no certificate")


def describe_certificate(certificate: dict[str, Any]) -> str:
    """Say in one line what the laws found."""
    return "; ".join(map(_describe_layer, certificate["layers"])) or "no layer was certified"


def _describe_layer(layer: dict[str, Any]) -> str:
    failing = _list_failing(layer)
    if failing:
        law = failing[0]
        more = f", and {len(failing) - 1} more" if failing[1:] else ""
        return f"{layer['layer']} breaks the law “{law['law']}”{more}: {law['counterexample']}"
    holding = [law for law in layer["laws"] if law["verdict"] == "holds"]
    left = [law["law"] for law in layer["laws"] if law["verdict"] == "not decided"]
    why = f" ({layer['note']})" if layer.get("note") else ""
    if not holding:
        return f"{layer['layer']}: no law was decided{why}"
    laws = [f"{law['law']}{_name_reach(law)}" for law in holding]
    words = [f"{layer['layer']} obeys {', '.join(laws)}"]
    words += [f"not decided: {', '.join(left)}"] if left else []
    words += [f"note: {law['note']}" for law in holding if law.get("note")]
    return "; ".join(words)


def _name_reach(law: dict[str, Any]) -> str:
    """Say up to how many tokens a law was tried, of the law for which that matters most."""
    return f" (up to {law['tokens']:,} tokens)" if law["law"] == "causal" else ""


def _list_failing(layer: dict[str, Any]) -> list[dict[str, Any]]:
    return [law for law in layer["laws"] if law["verdict"] == "fails"]
