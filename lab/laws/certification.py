"""Certifying a module: bring it to each condition and let every law judge it."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from lab.certify_settings import QUICK, CertifySettings, Condition
from lab.files import describe_error
from lab.laws import agreement, causal, decoding, derivative, documents, gradient, numerics, tables
from lab.laws.adaptation import Adapted, adapt, find_lengths_taken
from lab.laws.adapters import Adapter
from lab.laws.law import Law, Verdict
from lab.laws.loading import SmallModel, build, is_target, load
from lab.laws.noise import find_own_precision, find_precisions, in_double
from lab.laws.probes import (
    LENGTHS,
    Probes,
    Seeded,
    apply_condition,
    copy_module,
    draw,
    find_lengths_around_chunks,
    find_longer_lengths,
)
from lab.laws.reproduction import Origin
from lab.laws.tokens import Tokens
from tasks.bounds import check_choice

Target = str | nn.Module | Callable[..., Any]
"""A module, a function, or "package.module:factory"."""
HALVES = (torch.float16, torch.bfloat16)

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        agreement.REPEATS,
        causal.LAW,
        agreement.BATCHES,
        decoding.DECODING,
        decoding.RELATIVE,
        decoding.PADDING,
        documents.DOCUMENTS,
        gradient.LAW,
        derivative.LAW,
        derivative.TWICE,
        tables.LAW,
        agreement.FORMS,
        agreement.MATRIX,
        numerics.PRECISION,
        numerics.STABLE,
    )
}
"""Every law by name, in the order in which they are tried; a new law is a line here."""


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


def certify(
    target: Target, settings: CertifySettings | None = None, **changes: Any
) -> list[Verdict]:
    """Try the laws on a module, the lab's or foreign, and return the verdicts.

    >>> centred = lambda x: x - x.mean(1, keepdim=True)  # subtracts a mean that later inputs enter
    >>> verdicts = certify(centred, d_model=8, lengths=(7, 33), only=["deterministic", "causal"])
    >>> {verdict.law: verdict.verdict for verdict in verdicts}
    {'deterministic': 'holds', 'causal': 'fails'}

    Args:
        target: a module or function from [b t d] or tokens [b t], which is left unchanged; or
            "package.module:factory", which is imported and called anew for every seed.
        settings: what to try it on, and how much that may cost.
        changes: fields of `CertifySettings` that differ from the settings'; `device` may be a
            `torch.device`.

    Raises:
        ValueError: as `CertifySettings` and `Certification`; for an unknown law, lists the known
            ones.
    """
    if "device" in changes:
        changes["device"] = str(changes["device"])
    settings = replace(settings or CertifySettings(), **changes)
    selected = select_laws(settings.only)
    certification = Certification(target, settings)
    return [certification.judge(law) for law in selected]


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
        settings: other fields of `CertifySettings`; the defaults are those of `QUICK`, which take a
            few seconds and do not try training mode.

    Raises:
        AssertionError: names each law that is broken, its evidence and its counter-example, and
            ends with the program that shows the first.
        ValueError: as `Certification`; for an unknown law, lists the known ones.
    """
    selected = select_laws(laws, "laws")
    certification = Certification(
        target, replace(QUICK, d_model=d_model, lengths=lengths, **settings)
    )
    found = [certification.judge(law) for law in selected]
    broken = [v for v in found if v.verdict != "holds" and (laws or v.verdict == "fails")]
    lines = [f"{v.law} {v.verdict}: {v.counterexample or v.evidence}" for v in broken]
    lines += [f"  ({v.evidence})" for v in broken[:1] if v.counterexample]
    lines += [f"\n{v.snippet}" for v in broken if v.snippet][:1]
    assert not broken, "\n".join(lines)
    assert any(v.verdict == "holds" for v in found), f"no law was decided: {found[0].evidence}"


class Certification:
    """The trial of one target by the laws.

    Args:
        target: a module, a function, or "package.module:factory".
        settings: what to try it on, and how much that may cost.

    Attributes:
        notes: what was recognised by trying, in words.
        lengths: the sequence lengths that the target takes.

    Raises:
        ValueError: for a target that cannot be loaded or built, or that takes no input.
    """

    def __init__(self, target: Target, settings: CertifySettings | None = None):
        self.target = target
        self.settings = settings or CertifySettings()
        self.device = torch.device(self.settings.device)
        self._prepared: dict[tuple[Condition, bool], tuple[nn.Module, Probes]] = {}
        self._loaded = load(target) if isinstance(target, str) else target
        self.notes: list[str] = list(self._first.notes)
        self.lengths = self._find_lengths()

    @cached_property
    def _first(self) -> Adapted:
        return self._adapt(self.settings.seed)

    @property
    def d_model(self) -> int:
        """The width of the inputs."""
        return self._first.d_model

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions to try; a module that comes in evaluation mode is not set to training."""
        trains = self._first.module.training
        return tuple(c for c in self.settings.conditions if trains or not c.training)

    def __iter__(self) -> Iterator[Verdict]:
        """Yield each law's verdict."""
        return map(self.judge, LAWS)

    def judge(self, name: str) -> Verdict:
        """Return the verdict of the law with this name over its conditions."""
        law, verdicts = LAWS[name], []
        for condition in law.select(self.conditions):
            try:
                # Undo whatever the caller or the target's own code has switched off.
                with torch.inference_mode(False), torch.enable_grad(), _without_cudnn():
                    verdict = law.judge(*self._bring_to(condition, law.seeded))
            # The target's own code may raise anything.
            except Exception as error:
                words = f"raised {describe_error(error)}"
                verdict = Verdict(name, "not decided", words)
            verdict = self._restore_names(verdict)
            if verdict.verdict == "fails":
                where = "" if condition == self.conditions[0] else f" ({condition})"
                return replace(verdict, counterexample=f"{verdict.counterexample}{where}")
            verdicts.append((condition, verdict))
        return _merge(verdicts)

    def _restore_names(self, verdict: Verdict) -> Verdict:
        """Return a verdict that calls parameters by the names they have in the target."""
        prefix = "module." * len(_list_adapters(self._first.module))
        # Not in the middle of another name, nor in a file's name.
        strip = partial(re.sub, rf"(?<![\w.]){re.escape(prefix)}(?!py:)", "") if prefix else str
        words = verdict.counterexample
        return replace(
            verdict,
            evidence=strip(verdict.evidence),
            counterexample=words and strip(words),
            note=strip(verdict.note),
        )

    def _bring_to(self, condition: Condition, seeded: bool) -> tuple[nn.Module, Probes]:
        if (condition, seeded) not in self._prepared:
            self._prepared[condition, seeded] = self._prepare(condition, seeded)
        return self._prepared[condition, seeded]

    def _prepare(self, condition: Condition, seeded: bool) -> tuple[nn.Module, Probes]:
        """Return the target under a condition, and the probes for it."""
        seed = self.settings.seed + condition.seed
        adapted = self._adapt(seed)
        module = apply_condition(adapted.module, condition.weights, seed, condition.training)
        lengths, longer, d_model = self.lengths, (), adapted.d_model
        if condition == self.conditions[0]:
            longer = tuple(n for n in self._list_longer(adapted.module) if n not in lengths)
        if condition != self.conditions[0]:
            # Faults that weights hide show at a few lengths; those of lengths, with any weights.
            lengths = ([n for n in lengths if n <= LENGTHS[-1]] or lengths)[::-3][::-1]
        x = draw((self.settings.batch, lengths[-1], d_model), seed).to(self.device)
        module, own = module.to(self.device), find_own_precision(module)
        module, dtype = in_double(module, x)
        called = copy_module(module)  # laws get one that remembers no call
        random = seeded and _is_random(called, x.to(dtype))
        inside, angles = find_precisions(called, x.to(dtype))
        probes = Probes(
            replace(self.settings, d_model=d_model, lengths=lengths, seed=seed),
            dtype,
            own,
            inside,
            angles,
            # In half precision, rounding at another shape differs as much as a fault would.
            same_shape=random or inside in HALVES,
            origin=self._describe_origin(adapted, condition, dtype, random),
            longer=longer,
            undecoded=adapted.undecoded,
        )
        return Seeded(module) if random else module, probes

    def _list_longer(self, module: nn.Module) -> Sequence[int]:
        if self.settings.longer is not None:
            return self.settings.longer
        return find_longer_lengths(module) if self.settings.lengths is None else ()

    def _adapt(self, seed: int) -> Adapted:
        target, options = self._loaded, self.settings.options or {}
        if isinstance(self.target, str) and not is_target(target, options):
            target = build(target, options, seed)
        elif isinstance(target, nn.Module):
            target = copy_module(target)
        return adapt(target, **self.settings.list_calling())

    def _find_lengths(self) -> tuple[int, ...]:
        module = self._first.module
        wanted = self.settings.lengths or (*LENGTHS, *find_lengths_around_chunks(module))
        taken, refused = find_lengths_taken(
            copy_module(module).to(self.device).eval(),
            self.d_model,
            tuple(sorted(set(wanted))),
            self.settings.batch,
        )
        if not taken:
            words = "; ".join(f"length {length}: {why}" for length, why in refused.items())
            raise ValueError(f"the target takes none of the lengths: {words}")
        if refused:
            lengths, why = ", ".join(map(str, refused)), next(iter(refused.values()))
            self.notes.append(f"refuses lengths {lengths}: {why}")
        return taken

    def _describe_origin(
        self, adapted: Adapted, condition: Condition, dtype: torch.dtype, random: bool
    ) -> Origin:
        options, seed = self.settings.options or {}, self.settings.seed + condition.seed
        small = self._loaded if isinstance(self._loaded, SmallModel) else None
        options = options if small is None else small.complete(options)
        uses: list[Callable[..., Any]] = []
        lines = []
        if adapted.recipe != "module":
            lines.append(f"module = {adapted.recipe}")
            for adapter in _list_adapters(adapted.module):
                uses += adapter.list_sources()
        if condition.weights != "as built":
            lines.append(
                f"module = apply_condition(module, {condition.weights!r}, "
                f"seed={seed}, training={condition.training})"
            )
            uses.append(apply_condition)
        lines.append(f"module = module.to({self.device.type!r}).train({condition.training})")
        if self.device.type == "cuda":
            lines.append("torch.backends.cudnn.enabled = False")
        if dtype == torch.float64:
            lines.append("module = module.double()")
        if random:
            lines.append("module = Seeded(module)")
            uses.append(Seeded)
        return Origin(
            self.target if isinstance(self.target, str) else None,
            None if is_target(self._loaded, options) else tuple(options.items()),
            seed,
            tuple(lines),
            tuple(uses),
            small,
        )


def _list_adapters(module: nn.Module) -> list[Adapter | Tokens]:
    """List a module's adapters, the outermost first."""
    found = []
    held: Any = module  # what the last adapter holds: a module or a function
    while isinstance(held, Adapter | Tokens):
        found.append(held)
        held = held.module
    return found


def _merge(verdicts: list[tuple[Condition, Verdict]]) -> Verdict:
    """Merge the verdicts under several conditions, none of which fails, into one."""
    holding = [verdict for _, verdict in verdicts if verdict.verdict == "holds"]
    if not holding:
        return verdicts[0][1]
    worst = max(holding, key=lambda v: (v.measured or 0) / (v.allowed or 1))
    words, tokens = [worst.evidence], max(verdict.tokens for verdict in holding)
    if len(verdicts) > 1:
        reach = f", up to {tokens:,} tokens" if tokens > worst.tokens else ""
        n = len(holding)
        place = f"the worst of {n} conditions" if n > 1 else "in one condition"
        words.append(f"{place}{reach}")
    for condition, verdict in verdicts:
        left = verdict.evidence if verdict.verdict == "not decided" else verdict.left
        if left and verdict is not worst:
            words.append(f"not decided with {condition}: {left}")
    notes = [verdict.note for verdict in holding if verdict.note]
    words += [f"note: {note}" for note in notes[:1]]
    return replace(worst, evidence="; ".join(words), tokens=tokens)


@torch.no_grad()
def _is_random(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether two calls give different outputs."""
    return not torch.equal(module(x), module(x))


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Switch cuDNN off in a `with` block.

    Its recurrences have no backward in evaluation mode, and round fp32 to TF32's 10 bits.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
