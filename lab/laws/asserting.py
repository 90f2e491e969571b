"""Laws as assertions in other projects' tests."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lab.certify_settings import QUICK
from lab.laws.certification import Certification
from lab.laws.laws import LAWS
from tasks.bounds import check_choice


def assert_lawful(
    target: str | nn.Module | Callable[..., Any],
    d_model: int | None = None,
    lengths: Sequence[int] | None = QUICK.lengths,
    *,
    laws: Collection[str] | None = None,
    **settings: Any,
) -> None:
    """Fail a test, with the counter-examples, unless a module obeys the laws.

    >>> def test_my_mixer():
    ...     assert_lawful(nn.LSTM(8, 8, batch_first=True), laws=["causal", "batch-invariant"])
    >>> test_my_mixer()
    >>> assert_lawful(lambda x: x - x.mean(1, keepdim=True), 8, laws=["causal"])
    Traceback (most recent call last):
    AssertionError: causal fails: ...

    Args:
        target: as in `certify`.
        d_model: width d of the inputs; None finds it by trying.
        lengths: sequence lengths of the probes.
        laws: laws that must hold; "not applicable" and "not decided" fail the test too. None
            requires that no law fails and that at least one holds.
        settings: other fields of `CertifySettings`; the defaults are those of
            `lab.certify_settings.QUICK`, which take a few seconds.

    Raises:
        AssertionError: names each law that is broken, its evidence and its counter-example, and
            ends with the program that shows the first.
        ValueError: as `Certification`; for an unknown law, lists the known ones.
    """
    if isinstance(laws, str) or (laws is not None and not laws):
        raise ValueError(f"{laws=}: must be a list of one law or more, or None for all")
    for law in laws or ():
        check_choice("laws", law, LAWS)
    certification = Certification(
        target, replace(QUICK, d_model=d_model, lengths=lengths, **settings)
    )
    found = [certification.judge(law) for law in (LAWS if laws is None else laws)]
    broken = [v for v in found if v.verdict != "holds" and (laws or v.verdict == "fails")]
    lines = [f"{v.law} {v.verdict}: {v.counterexample or v.evidence}" for v in broken]
    lines += [f"  ({v.evidence})" for v in broken[:1] if v.counterexample]
    lines += [f"\n{v.snippet}" for v in broken if v.snippet][:1]
    assert not broken, "\n".join(lines)
    assert any(v.verdict == "holds" for v in found), f"no law was decided: {found[0].evidence}"
