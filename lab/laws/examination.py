"""A target before the laws: brought to each condition, then judged, law by law."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from lab.laws.adapters import Adapted, accepted, adapt
from lab.laws.batch import batch_invariant
from lab.laws.budget import LENGTHS, Budget, around_chunks
from lab.laws.causal import causal
from lab.laws.conditions import CONDITIONS, Condition, Seeded, brought
from lab.laws.copying import copied
from lab.laws.decoding import prefill_equals_step, relative_positions
from lab.laws.forms import forms_agree
from lab.laws.gradient import gradient_reach
from lab.laws.loading import build, is_target, load
from lab.laws.matrix import matrix_applies
from lab.laws.padding import padding
from lab.laws.precision import precision
from lab.laws.probes import Probes, draw, in_double, precisions_inside
from lab.laws.repeatable import deterministic
from lab.laws.reproduction import Origin
from lab.laws.stable import stable
from lab.laws.tables import table_reach
from lab.laws.verdict import Law, Verdict

LAWS: dict[str, Law] = {
    "deterministic": deterministic,
    "causal": causal,
    "batch-invariant": batch_invariant,
    "prefill = step": prefill_equals_step,
    "relative": relative_positions,
    "padding": padding,
    "gradient reach": gradient_reach,
    "table reach": table_reach,
    "forms agree": forms_agree,
    "matrix applies": matrix_applies,
    "precision": precision,
    "stable": stable,
}
"""Every law by the name that its verdicts carry."""

WHATEVER_WEIGHTS = ("prefill = step", "relative", "padding", "matrix applies")
"""Laws that hold for any weights, evaluating; they are tried under every such condition."""
WHATEVER_MODE = ("causal", "batch-invariant")
"""Laws that hold in training too."""
UNSEEDED = ("deterministic", *WHATEVER_WEIGHTS)
"""Laws that see the random numbers a module draws; for all others a seed holds them."""
HALVES = (torch.float16, torch.bfloat16)

ADAPTERS = "lab.laws.adapters"


@dataclass
class Examination:
    """The trial of one target.

    Attributes:
        target: "package.module:factory", a module, or a function.
        d_model: width of inputs; None where it is to be found.
        lengths: of the probes; None for `LENGTHS` and those around chunks that the target names.
        batch: rows of a probe.
        seed: added to every condition's.
        options: what a factory is called with.
        calling: how the target is called (`adapt`), where that is not to be found.
        budget: how much it may cost.
        device: where to try it.

    Found when it is made: `notes`, what was recognised, in words; `taken`, the lengths that the
    target takes.

    Raises:
        ValueError: for bounds, for a target that cannot be loaded or built, or that takes no input.
    """

    target: str | nn.Module | Callable[..., Any]
    d_model: int | None = None
    lengths: Sequence[int] | None = None
    batch: int = 3
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    calling: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        numbers = {"d_model": self.d_model, "batch": self.batch}
        numbers |= {"max_len": self.budget.max_len, "rounding_len": self.budget.rounding_len}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.lengths is not None and min(self.lengths, default=0) < 1:
            raise ValueError(f"lengths={tuple(self.lengths)}: there must be one, each at least 1")
        if not self.budget.seconds > 0:
            raise ValueError(f"seconds={self.budget.seconds} must be above 0")
        self._prepared: dict[tuple[Condition, bool], tuple[nn.Module, Probes]] = {}
        self._loaded = load(self.target) if isinstance(self.target, str) else self.target
        self.notes: list[str] = list(self._first.notes)
        self.taken = self._accepted()

    @cached_property
    def _first(self) -> Adapted:
        return self._adapted(self.seed)

    @property
    def width(self) -> int:
        """The width of the inputs."""
        return self._first.d_model

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Those it is brought to: a module that comes evaluating is not made to train."""
        trains = self._first.module.training
        return tuple(c for c in self.budget.conditions if trains or not c.training)

    def __iter__(self) -> Iterator[Verdict]:
        """Yield each law's verdict."""
        return map(self.verdict, LAWS)

    def verdict(self, law: str) -> Verdict:
        """Return a law's verdict over the conditions that matter to it."""
        found = []
        for condition in self._conditions_of(law):
            try:
                # Whatever the caller has switched off, and the target's own code.
                with torch.inference_mode(False), torch.enable_grad():
                    one = LAWS[law](*self._brought(condition, law not in UNSEEDED))
            # The target's own code, which may raise anything.
            except Exception as error:
                words = f"raised {type(error).__name__}: {error}".splitlines()[0]
                one = Verdict(law, "not decided", words)
            one = self._named(one)
            if one.verdict == "fails":
                where = "" if condition == self.conditions[0] else f" ({condition})"
                return replace(one, counterexample=f"{one.counterexample}{where}")
            found.append((condition, one))
        return _merged(law, found)

    def _named(self, verdict: Verdict) -> Verdict:
        """Return a verdict that calls parameters by the names they have in the target."""
        held = "module." * len(_adapters(self._first.module))
        # Not in the middle of another name, nor in a file's.
        own = partial(re.sub, rf"(?<![\w.]){re.escape(held)}(?!py:)", "") if held else str
        words = verdict.counterexample
        return replace(verdict, evidence=own(verdict.evidence), counterexample=words and own(words))

    def _conditions_of(self, law: str) -> list[Condition]:
        if law in WHATEVER_MODE:
            return list(self.conditions)
        if law in WHATEVER_WEIGHTS:
            return [condition for condition in self.conditions if not condition.training]
        return [self.conditions[0]]

    def _brought(self, condition: Condition, seeded: bool) -> tuple[nn.Module, Probes]:
        if (condition, seeded) not in self._prepared:
            self._prepared[condition, seeded] = self._prepare(condition, seeded)
        return self._prepared[condition, seeded]

    def _prepare(self, condition: Condition, seeded: bool) -> tuple[nn.Module, Probes]:
        """Return the target under a condition, and what it is tried on there."""
        seed = self.seed + condition.seed
        adapted = self._adapted(seed)
        module = brought(adapted.module, condition.weights, seed, condition.training)
        lengths, d_model = self.taken, adapted.d_model
        if condition != self.conditions[0]:
            # What weights hide is seen at some lengths; what lengths hide, with any weights.
            lengths = ([n for n in lengths if n <= LENGTHS[-1]] or lengths)[::-3][::-1]
        x = draw((self.batch, lengths[-1], d_model), seed).to(self.device)
        module, dtype = in_double(module.to(self.device), x)
        random = seeded and _draws(module, x.to(dtype))
        inside, angles = precisions_inside(module, x.to(dtype))
        module = Seeded(module) if random else module
        probes = Probes(
            d_model,
            lengths,
            self.batch,
            seed,
            dtype,
            self.device,
            max_len=self.budget.max_len,
            rounding_len=self.budget.rounding_len,
            seconds=self.budget.seconds,
            compiler=self.budget.compiler,
            inside=inside,
            angles=angles,
            # Another shape rounds otherwise, in half precision as much as a fault would.
            same_shape=random or inside in HALVES,
            origin=self._origin(adapted, condition, dtype, random),
        )
        return module, probes

    def _adapted(self, seed: int) -> Adapted:
        found = self._loaded
        if isinstance(self.target, str) and not is_target(found, self.options):
            found = build(found, self.options, seed)
        elif isinstance(found, nn.Module):
            found = copied(found)
        calling = {"d_model": self.d_model, **self.calling}
        return adapt(found, **calling)

    def _accepted(self) -> tuple[int, ...]:
        wanted = tuple(sorted(set(self.lengths or (*LENGTHS, *around_chunks(self._first.module)))))
        module = copied(self._first.module).to(self.device).eval()
        taken, refused = accepted(module, self._first.d_model, wanted, self.batch)
        if not taken:
            words = "; ".join(f"length {length}: {why}" for length, why in refused.items())
            raise ValueError(f"the target takes none of the lengths: {words}")
        if refused:
            lengths, why = ", ".join(map(str, refused)), next(iter(refused.values()))
            self.notes.append(f"refuses lengths {lengths}: {why}")
        return taken

    def _origin(
        self, adapted: Adapted, condition: Condition, dtype: torch.dtype, random: bool
    ) -> Origin:
        uses: list[Callable[..., Any]] = []
        lines = []
        if adapted.recipe != "module":
            lines.append(f"module = {adapted.recipe}")
            uses += _adapters(adapted.module)
        if condition.weights != "as built":
            lines.append(
                f"module = brought(module, {condition.weights!r}, "
                f"seed={self.seed + condition.seed}, training={condition.training})"
            )
            uses.append(brought)
        lines.append(f"module = module.to({self.device.type!r}).train({condition.training})")
        if dtype == torch.float64:
            lines.append("module = module.double()")
        if random:
            lines.append("module = Seeded(module)")
            uses.append(Seeded)
        return Origin(
            self.target if isinstance(self.target, str) else None,
            None if is_target(self._loaded, self.options) else tuple(self.options.items()),
            self.seed + condition.seed,
            tuple(lines),
            tuple(uses),
        )


def certify(
    target: str | nn.Module | Callable[..., Any],
    d_model: int | None = None,
    lengths: Sequence[int] | None = None,
    batch: int = 3,
    seed: int = 0,
    *,
    options: Mapping[str, Any] | None = None,
    calling: Mapping[str, Any] | None = None,
    conditions: tuple[Condition, ...] = CONDITIONS,
    max_len: int = 65_536,
    rounding_len: int = 1024,
    seconds: int | float = 5.0,
    compiler: str | None = None,
    device: str | torch.device = "cpu",
) -> list[Verdict]:
    """Try every law on a module, ours or foreign, and return its verdicts.

    >>> certify("torch.nn:GRU", options={"input_size": 8, "hidden_size": 8})  # doctest: +SKIP

    Args:
        target: a module or function from [b t d] or tokens [b t], which comes out as it went in; or
            "package.module:factory", which is imported, and called anew for every seed.
        d_model: width d of the inputs; found by trying where it is None.
        lengths: sequence lengths t; by default such as break things, those around the module's own
            chunks among them. Lengths that the module refuses are left out.
        batch: rows b of a probe.
        seed: of weights and probes, added to each condition's own.
        options: what a factory is called with.
        calling: how the module is called, where that is not found: see `lab.laws.adapters.adapt`.
        conditions: weights and modes under which the laws of identity are tried.
        max_len: tokens after which "stable" is content.
        rounding_len: tokens among which "precision" counts roundings.
        seconds: what a law may take under one condition, above 0.
        compiler: torch.compile's backend for "forms agree", "inductor" or "aot_eager"; compiling
            takes seconds, so None leaves that law undecided.
        device: where to try it.

    Raises:
        ValueError: as `Examination`.
    """
    budget = Budget(conditions, max_len, rounding_len, seconds, compiler)
    examined = Examination(
        target,
        d_model,
        lengths,
        batch,
        seed,
        options or {},
        calling or {},
        budget,
        torch.device(device),
    )
    return list(examined)


def _adapters(module: nn.Module) -> list[type[nn.Module]]:
    """Return the classes of a module's adapters, from the outermost in."""
    found: list[type[nn.Module]] = []
    held: Any = module  # by the last of them: a module, or a function
    while type(held).__module__.startswith(ADAPTERS):
        found.append(type(held))
        held = held.module
    return found


def _merged(law: str, found: list[tuple[Condition, Verdict]]) -> Verdict:
    """Return one verdict of those under several conditions, none of which fails."""
    held = [verdict for _, verdict in found if verdict.verdict == "holds"]
    if not held:
        return found[0][1]
    worst = max(held, key=lambda v: (v.measured or 0) / (v.allowed or 1))
    words = [worst.evidence]
    if len(found) > 1:
        words.append(f"the worst of {len(held)} conditions")
    for condition, verdict in found:
        left = verdict.evidence if verdict.verdict == "not decided" else verdict.left
        if left and verdict is not worst:
            words.append(f"not decided with {condition}: {left}")
    return replace(worst, evidence="; ".join(words))


@torch.no_grad()
def _draws(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether a module gives another output each time."""
    return not torch.equal(module(x), module(x))
