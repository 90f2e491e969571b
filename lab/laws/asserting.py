"""Laws inside other projects' tests."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from lab.laws.budget import QUICK, QUICK_LENGTHS, Budget
from lab.laws.examination import LAWS, Examination


def assert_lawful(
    target: str | nn.Module | Callable[..., Any],
    d_model: int | None = None,
    lengths: Sequence[int] = QUICK_LENGTHS,
    *,
    laws: Collection[str] | None = None,
    calling: Mapping[str, Any] | None = None,
    budget: Budget = QUICK,
) -> None:
    """Fail a test, with the counter-examples, unless a module keeps its promises.

    >>> def test_mixer():
    ...     assert_lawful(Mixer(64), laws=["causal", "prefill = step"])

    Args:
        target: as `certify`.
        d_model: as `certify`.
        lengths: as `certify`.
        laws: those that must hold, where not applicable and not decided will not do; None asks of
            all laws that none fails, and that one can be decided.
        calling: how the module is called, where that is not found: see `lab.laws.adapters.adapt`.
        budget: what trying may cost, a few seconds by default.

    Raises:
        AssertionError: names each law that was broken, its evidence and its counter-example, and
            ends with the program that shows the first.
        ValueError: as `Examination`; for a law of no known name, lists the known.
    """
    if isinstance(laws, str) or (laws is not None and not laws):
        raise ValueError(f"{laws=}: must be a list of one law or more, or None for all")
    unknown = [law for law in laws or () if law not in LAWS]
    if unknown:
        raise ValueError(f"laws={unknown}: must be among {', '.join(LAWS)}")
    examined = Examination(target, d_model, lengths, calling=calling or {}, budget=budget)
    found = [examined.verdict(law) for law in (LAWS if laws is None else laws)]
    broken = [v for v in found if v.verdict != "holds" and (laws or v.verdict == "fails")]
    lines = [f"{v.law} {v.verdict}: {v.counterexample or v.evidence}" for v in broken]
    lines += [f"  ({v.evidence})" for v in broken[:1] if v.counterexample]
    lines += [f"\n{v.snippet}" for v in broken if v.snippet][:1]
    assert not broken, "\n".join(lines)
    assert any(v.verdict == "holds" for v in found), f"no law was decided: {found[0].evidence}"
