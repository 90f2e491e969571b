"""Which known name a mistyped or foreign one stands for."""

from collections.abc import Iterable
from difflib import get_close_matches

SYNONYMS = {
    "run_dir": "out",
    "output_dir": "out",
    "save_dir": "out",
    "log_dir": "out",
    "dtype": "precision",
    "lr": "learning_rate",
    "wd": "weight_decay",
    "steps": "max_steps",
    "n_steps": "max_steps",
    "epochs": "max_steps",
    "bs": "batch_size",
    "heads": "n_heads",
    "layers": "stack",
    "n_layers": "stack",
    "architecture": "stack",
    "hidden_size": "d_model",
    "width": "d_model",
    "length": "seq_len",
    "n_ctx": "seq_len",
    "d_vocab": "vocab_size",
    "gpu": "device",
    "logger": "log",
    "config_file": "config",
    "law": "only",
    "laws": "only",
    "analysis": "only",
    "analyses": "only",
}
"""What other libraries and commands call an option, and its name here."""


def find_near(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known names that a name may stand for, the nearest first.

    Case, hyphens and underscores make no difference, so `--Seq_len` is near `--seq-len`.
    """
    spelled = {_simplify(word): word for word in known}
    asked = _simplify(name)
    meant = SYNONYMS.get(asked)
    near = [meant] if meant in spelled else get_close_matches(asked, spelled, n=most)
    return [spelled[word] for word in near]


def suggest(name: str, known: Iterable[str]) -> str:
    """Ask whether a near name was meant; if none is near, list the known ones."""
    known = list(known)
    return ask(find_near(name, known)) or f"Known: {', '.join(known)}"


def list_choices(name: str, known: Iterable[str]) -> str:
    """Say what a name must be, and ask whether a near one was meant."""
    known = list(known)
    question = ask(find_near(name, known))
    return f"must be one of {', '.join(known)}" + (f". {question}" if question else "")


def ask(near: Iterable[str]) -> str:
    """Ask whether one of some names was meant; "" if there is none."""
    names = " or ".join(near)
    return names and f"Did you mean {names}?"


def _simplify(name: str) -> str:
    return name.casefold().replace("-", "_").strip("_")
