"""Laws of arguments beside the input: packed documents do not mix, and masks leave padding out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.adapters import POSITIONS, Adapter, get_parameters
from lab.laws.comparison import ROUNDINGS, Memoized, run_trials
from lab.laws.law import Law, Trial, Verdict, describe_refusal
from lab.laws.noise import noise_floor, relative_error
from lab.laws.probes import Probes, Seeded, draw
from lab.laws.tokens import Tokens

NUMBERED = ("seq_idx", "document_ids", "doc_ids", "segment_ids", "sequence_ids", "segment_idx")
"""Arguments [b t] that number the documents of a row."""
LENGTHS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "offsets")
"""Arguments [n + 1] that list where each document of a single row begins, and the last ends."""
MASKS = (
    *("attention_mask", "padding_mask", "key_padding_mask", "src_key_padding_mask", "pad_mask"),
    "mask",
)
UNSURE = ("mask",)
"""Names of masks that may mean something else than padding."""


WRAPPERS = (Adapter, Tokens, Seeded, Memoized)


def _list_held(module: Any) -> list[Any]:
    """Return a module and what it wraps, one after another; the user's is the last."""
    held = [module]
    while isinstance(held[-1], WRAPPERS):
        held.append(held[-1].module)
    return held


def find_arguments(module: Any, names: tuple[str, ...]) -> list[str]:
    """Return which of these arguments a module's forward takes, beside the first."""
    parameters = get_parameters(_list_held(module)[-1])
    return [name for name in names if name in parameters]


@contextmanager
def give(module: Any, **arguments: Tensor) -> Iterator[None]:
    """Give a module's forward further arguments within a `with` block, through its adapters."""
    *holders, inner = _list_held(module)
    if not isinstance(inner, nn.Module):
        holders[-1].module = partial(inner, **arguments)
        try:
            yield
        finally:
            holders[-1].module = inner
        return

    def forward(*given: Any, **others: Any) -> Any:
        del inner.forward  # it may call itself for each document
        try:
            return inner.forward(*given, **others, **arguments)
        finally:
            inner.forward = forward

    inner.forward = forward
    try:
        yield
    finally:
        del inner.forward


def judge_documents(module: nn.Module, probes: Probes) -> Verdict:
    """Packed documents give the outputs that each gives alone: nothing passes from one to the next.

    The first row is read as two or three documents, of which one has a single token. Where the
    module also takes positions, these count from 0 in each. Positions alone promise nothing: where
    they do not keep documents apart, the law is not applicable, and says how far off they are.
    """
    names = find_arguments(module, (*NUMBERED, *LENGTHS))
    positions = find_arguments(module, POSITIONS)[:1]
    if not names and not positions:
        missing = f"the module takes none of {', '.join((*NUMBERED, *LENGTHS))}"
        return Verdict(DOCUMENTS.name, "not applicable", missing)
    tried = probes.with_lengths([n for n in probes.lengths if n > 2] or probes.lengths)

    def trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
        t = x.shape[1]
        for name in names or ("",):
            for ends in ([0, t // 2, t], [0, 1, t - t // 3, t]):
                ends = sorted({*ends})
                given = {"name": name, "positions": (*positions, "")[0], "ends": ends}
                words = f"with documents of {_name_sizes(ends)} tokens, given as "
                words += " and ".join(filter(None, (name, *positions)))
                yield Trial(
                    compare_documents, given, f"{words}, output {{position}} of row {{row}} moves"
                )

    found = run_trials(DOCUMENTS.name, module, tried, trials)
    if names or found.verdict != "fails":
        return found
    words = f"{positions[0]} that count from 0 again do not keep documents apart "
    words += f"(relative error {found.measured:.2g}), and no other argument names them"
    return Verdict(DOCUMENTS.name, "not applicable", words)


DOCUMENTS = Law("documents do not mix", judge_documents, conditions="evaluating", seeded=False)


def _name_sizes(ends: list[int]) -> str:
    sizes = [str(end - begin) for begin, end in pairwise(ends)]
    return f"{', '.join(sizes[:-1])} and {sizes[-1]}"


@torch.no_grad()
def compare_documents(
    module: Any, x: Tensor, name: str, positions: str, ends: list[int]
) -> tuple[Tensor, Tensor]:
    """Return how outputs of the first row move when its documents are read together."""
    row = x[:1].clone()
    parts = list(pairwise(ends))
    alone = torch.cat([module(row[:, begin:end]) for begin, end in parts], 1)
    given = {}
    if name in LENGTHS:
        given[name] = torch.tensor(ends, dtype=torch.int32, device=x.device)
    elif name:
        numbers = [torch.full((end - begin,), i) for i, (begin, end) in enumerate(parts)]
        given[name] = torch.cat(numbers)[None].int().to(x.device)
    if positions:
        counted = torch.cat([torch.arange(end - begin) for begin, end in parts])
        given[positions] = counted[None].to(x.device)
    with give(module, **given):
        packed = module(row)
    return packed - alone, alone


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool, True for tokens": lambda keep: keep,
    "1 for tokens": lambda keep: keep.long(),
    "1.0 for tokens": lambda keep: keep.float(),
    "bool, True for padding": lambda keep: ~keep,
    "added": lambda keep: torch.zeros(keep.shape).masked_fill(~keep, -1e30),
    "bool [b 1 1 t], True for tokens": lambda keep: keep[:, None, None],
    "added [b 1 1 t]": lambda keep: torch.zeros(keep.shape).masked_fill(~keep, -1e30)[
        :, None, None
    ],
}
"""What a mask of padding may look like, by name."""


def judge_mask(law: str, module: nn.Module, probes: Probes) -> Verdict | None:
    """Judge whether a mask leaves out what stands at padding; None where the module takes none.

    Outputs at tokens must not depend on what padding holds; where it stands on the left, absolute
    positions may move them. What the mask looks like is found by trying: one that keeps every token
    must change nothing.
    """
    names = find_arguments(module, MASKS)
    if not names:
        return None
    name, x = names[0], probes.input(max(n for n in probes.lengths if n <= MOST or n == 1))
    given = {"name": name, "positions": (*find_arguments(module, POSITIONS), "")[0]}
    errors, refused = {}, ""
    for form in FORMS:
        try:
            difference, y = compare_full_mask(module, x, form=form, **given)
            if relative_error(difference, y) <= ROUNDINGS * noise_floor(module, x, probes.inside):
                kept = (compare_masked(module, x, form=form, side=side, **given) for side in SIDES)
                errors[form] = max((relative_error(*pair) for pair in kept), key=_rank)
        except Exception as error:
            refused = refused or describe_refusal(error)
    if not errors:
        words = f"it takes {name}, but no mask was found that keeps every token: {refused}"
        return Verdict(law, "not decided", words)
    form = min(errors, key=lambda form: _rank(errors[form]))
    recipe = {**given, "form": form}

    def trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
        for side in SIDES:
            told = {**recipe, "side": side}
            words = f"{name} ({form}), padding on the {side}: "
            moved = "what padding holds moves output {position} of row {row}"
            yield Trial(compare_masked, told, f"{words}{moved}")
            moved = "a gradient at padding is not zero, or NaN, at {position} of row {row}"
            yield Trial(measure_masked_gradient, told, f"{words}{moved}")

    few = [n for n in sorted({*probes.lengths[::2], probes.lengths[-1]}) if n > 2]
    found = run_trials(law, module, probes.with_lengths(few or probes.lengths), trials)
    if found.verdict == "fails" and name in UNSURE:
        words = f"{found.counterexample}; but {name} may be no mask of padding"
        return Verdict(law, "not decided", words)
    return found


MOST = 33
"""Longest input on which the look of a mask is tried."""
SIDES = ("left", "right")


def _rank(error: float) -> float:
    """Order errors, NaN last."""
    return error if error == error else torch.inf


@torch.no_grad()
def compare_full_mask(
    module: Any, x: Tensor, name: str, positions: str, form: str
) -> tuple[Tensor, Tensor]:
    """Return how outputs move when a mask keeps every token."""
    keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    with give(module, **{name: FORMS[form](keep)}):
        masked = module(x.clone())
    y = module(x.clone())
    return masked - y, y


@torch.no_grad()
def compare_masked(
    module: Any, x: Tensor, name: str, positions: str, form: str, side: str
) -> tuple[Tensor, Tensor]:
    """Return how outputs at tokens move when what stands at padding changes."""
    keep, given = make_mask(x, name, positions, form, side)
    other = torch.where(keep[..., None], x, 30 * draw(x.shape, seed=x.shape[1]).to(x))
    with give(module, **given):
        first, second = module(x.clone()), module(other)
    return torch.where(keep[..., None], second - first, 0), first.where(keep[..., None], 0)


def measure_masked_gradient(
    module: Any, x: Tensor, name: str, positions: str, form: str, side: str
) -> tuple[Tensor, Tensor]:
    """Return the gradient of outputs at tokens that reaches padding, and any that is not finite."""
    keep, given = make_mask(x, name, positions, form, side)
    inputs = x.clone().requires_grad_()
    with give(module, **given):
        y = module(inputs.clone())[keep]
    (grad,) = torch.autograd.grad((y * draw(y.shape, seed=0).to(y)).sum(), inputs)
    return grad.where(~keep[..., None] | ~grad.isfinite(), 0), grad


def make_mask(
    x: Tensor, name: str, positions: str, form: str, side: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return which places hold tokens, and the arguments that say so.

    The first row is without padding; the others have more and more of it.
    """
    b, t, _ = x.shape
    counts = torch.tensor([t - row * (t - 1) // b for row in range(b)])[:, None]
    places = torch.arange(t).expand(b, t)
    keep = places >= t - counts if side == "left" else places < counts
    given = {name: FORMS[form](keep).to(x.device)}
    if positions:
        given[positions] = (keep.cumsum(1) - 1).clamp(min=0).to(x.device)
    return keep.to(x.device), given
