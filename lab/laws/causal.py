"""The law of causality: no output depends on later tokens."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lab.laws.comparison import run_in_half, run_trials
from lab.laws.law import Law, Trial, Verdict, read_clock
from lab.laws.probes import Probes, draw
from lab.laws.tokens import Tokens, encode_token, encode_tokens

Special = Mapping[str, int] | None
"""The arguments of `encode_token` beside the width; None for a vector of zeros."""
NAMED = re.compile(r"(^|_)(pad|eos|bos|sep|separator|cls|mask|unk|eot)(_|$)|token_id$")
"""Names of attributes that hold a token with a meaning of its own."""
MOST_NAMED = 8
NUMBERS = 2**22
"""Numbers that a model may return at once while its vocabulary is searched."""


def list_special(module: nn.Module) -> list[Special]:
    """List what a module might take for padding or for an end.

    A module that reads vectors: zeros. One that reads tokens: the first two, the last, and those
    that it or its configuration names. An embedding's `padding_idx` is never read.
    """
    reader = next((part for part in module.modules() if isinstance(part, Tokens)), None)
    if reader is None:
        return [None]
    owners: list[Any] = list(reader.modules())
    owners += [config for part in owners if (config := getattr(part, "config", None)) is not None]
    named = dict.fromkeys(token for owner in owners for token in _list_named(owner))
    size, skip = reader.vocab_size, -1 if reader.skip is None else reader.skip
    first = [token for token in named if 0 <= token < size][:MOST_NAMED]
    ids = sorted({0, 1, size - 1, *first} - {skip})
    return [{"token": token, "vocab_size": size, "skip": skip} for token in ids]


def _list_named(owner: Any) -> Iterator[int]:
    """Yield the tokens that the attributes of an object or of its class name."""
    for name in {**getattr(owner, "__dict__", {}), **vars(type(owner))}:
        token = getattr(owner, name, None) if NAMED.search(name) else None
        if type(token) is int:
            yield token


@torch.no_grad()
def find_token_suspect(module: nn.Module, x: Tensor, seconds: float) -> Special:
    """Return the token that moves earlier outputs most, where it is last; None if none does.

    Args:
        module: a module that reads tokens.
        x: the input, of which the first row is taken [b t d].
        seconds: time for the search, which takes tokens from both ends of the vocabulary in turns.
    """
    reader = next((part for part in module.modules() if isinstance(part, Tokens)), None)
    if reader is None:
        return None
    size, skip = reader.vocab_size, -1 if reader.skip is None else reader.skip
    tokens = torch.arange(size)
    tokens = torch.stack([tokens, tokens.flip(0)], 1).flatten()[:size]
    y, began = module(x[:1])[:, :-1], read_clock()
    most, suspect = 0.0, None
    for some in tokens[tokens != skip].split(max(1, NUMBERS // (x.shape[1] * y[0, 0].numel()))):
        if read_clock() - began > seconds:
            break
        rows = x[:1].repeat(len(some), 1, 1)
        rows[:, -1] = encode_tokens(x.shape[-1], some, size, skip).to(x)
        moved = (module(rows)[:, :-1] - y).flatten(1).abs().amax(1).nan_to_num(torch.inf)
        if moved.max() > most:
            most, token = moved.max().item(), int(some[moved.argmax()])
            suspect = {"token": token, "vocab_size": size, "skip": skip}
    return suspect


def put_special(x: Tensor, special: Special, places: slice) -> Tensor:
    """Return x [b t d] with a special input at some places."""
    x = x.clone()
    vector = 0.0 if special is None else encode_token(x.shape[-1], **special).to(x)
    x[:, places] = vector
    return x


@torch.no_grad()
def compare_special(
    module: Any, x: Tensor, s: int, end: int, special: Special
) -> tuple[Tensor, Tensor]:
    """Return how the outputs before position s move when the inputs from s to the end change."""
    y = module(x)
    changed = put_special(x, special, slice(s, end))
    return module(changed)[:, :s] - y[:, :s], y


@torch.no_grad()
def compare_beside_special(
    module: Any, x: Tensor, s: int, special: Special
) -> tuple[Tensor, Tensor]:
    """Return how the first row moves when the others end in a special input from s on."""
    y = module(x)
    changed = put_special(x, special, slice(s, None))
    changed[0] = x[0]
    return (module(changed) - y)[:1], y


def name_special(special: Special) -> str:
    """Name a special input."""
    return "zeros" if special is None else f"token {special['token']}"


TOKENS = 2**12
"""Tokens of the batches that are searched for suspects."""
FEW = 8
SHORT = (2, 7, 8, 33)
"""Lengths at which special inputs are tried."""
SEARCHED = 2
"""Length of the inputs whose last token is each of the vocabulary."""
SHARE = 0.1
"""Share of the law's time for that search."""


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """No output depends on a later input, forward or by gradient.

    One batch holds a copy of the input for each position, with that position changed. Positions
    that move an earlier output, and outputs with a gradient at a later position, are suspects; each
    is then tried by itself. Cuts are tried at every length up to 16, and at eight of a longer one.
    """

    def trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
        yield from _list_trials(module, x, cuts=not probes.same_shape)
        if x.shape[1] == SEARCHED:
            yield from _list_token_trials(module, x, probes.settings.seconds)

    # Calls with inputs of the same shape round alike.
    inside = probes.dtype if probes.same_shape else None
    longer = None if probes.same_shape else _list_longer_trials
    found = run_trials(LAW.name, module, probes, trials, inside=inside, longer=longer)
    if found.verdict != "holds":
        return found
    return run_in_half(LAW.name, module, probes, _list_half_trials) or found


LAW = Law("causal", judge, conditions="all")


def _list_trials(module: nn.Module, x: Tensor, cuts: bool) -> Iterator[Trial]:
    length = x.shape[1]
    # A small change shows a smooth leak; a larger one can flip a hidden choice.
    for scale in (1, 8):
        for s in {*_search(_find_suspects, module, x, scale), *_spread(1, length - 1, 3)}:
            words = f"changing position {s} moves output {{position}} of row {{row}}"
            yield Trial(compare_changed_position, {"s": s, "scale": scale}, words)
    if length in SHORT:
        for special in list_special(module):
            for s, end in ((length // 2, length), (length // 2, length // 2 + 1)):
                words = f"{name_special(special)} from position {s} to {end - 1} in place of others"
                words += " moves output {position} of row {row}"
                given = {"s": s, "end": end, "special": special}
                yield Trial(compare_special, given, words)
    if cuts:
        for s in _spread(0, length - 2, 16 if length <= 16 else FEW):
            words = f"cutting the input after position {s} moves output {{position}} of row {{row}}"
            yield Trial(compare_cut, {"s": s}, words, refusable=True)
    for s in {*_search(_find_gradient_suspects, module, x), *_spread(0, length - 2, 3)}:
        words = f"output {s} of row {{row}} has a gradient at position {{position}}"
        yield Trial(measure_gradient_ahead, {"s": s}, words)


def _list_token_trials(module: nn.Module, x: Tensor, seconds: float) -> Iterator[Trial]:
    """Yield the trial of the token that a search of the vocabulary suspects."""
    special, t = find_token_suspect(module, x, SHARE * seconds), x.shape[1]
    if special is not None:
        words = f"{name_special(special)} at position {t - 1} in place of another"
        words += " moves output {position} of row {row}"
        given = {"s": t - 1, "end": t, "special": special}
        yield Trial(compare_special, given, words)


def _list_longer_trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    """Yield the trials of long inputs: those most likely to show a leak."""
    length = x.shape[1]
    for s in _search(_find_suspects, module, x, 8):
        words = f"changing position {s} moves output {{position}} of row {{row}}"
        yield Trial(compare_changed_position, {"s": s, "scale": 8}, words)
    for s in (length // 2, length - 2):
        words = f"cutting the input after position {s} moves output {{position}} of row {{row}}"
        yield Trial(compare_cut, {"s": s}, words, refusable=True)


def _list_half_trials(module: nn.Module, x: Tensor) -> Iterator[Trial]:
    """Yield trials whose calls have inputs of the same shape, so that they round alike."""
    for s in _spread(1, x.shape[1] - 1, 3):
        words = f"changing position {s} moves output {{position}} of row {{row}}"
        yield Trial(compare_changed_position, {"s": s, "scale": 8}, words)


@torch.no_grad()
def compare_changed_position(
    module: nn.Module, x: Tensor, s: int, scale: int
) -> tuple[Tensor, Tensor]:
    """Return how the outputs before position s move when that position changes."""
    changed = x.clone()
    changed[:, s] = scale * draw(x[:, s].shape, seed=s + 1).to(x)
    y = module(x)
    return module(changed)[:, :s] - y[:, :s], y


@torch.no_grad()
def compare_cut(module: nn.Module, x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Return how the outputs up to position s move when the sequence ends there."""
    y = module(x)
    return module(x[:, : s + 1]) - y[:, : s + 1], y


def measure_gradient_ahead(module: nn.Module, x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of output s at later positions, zero elsewhere, and all of it."""
    inputs = x.clone().requires_grad_()
    output = module(inputs)[:, s]
    if not output.requires_grad:
        return torch.zeros_like(x), x
    weighted = (output * draw(output.shape, seed=s).to(output)).sum()
    (grad,) = torch.autograd.grad(weighted, inputs)
    ahead = grad.clone()
    ahead[:, : s + 1] = 0
    return ahead, grad


def _search(find: Callable[..., list[int]], *given: Any) -> list[int]:
    """Return what a search finds; nothing where the module refuses its rows, e.g. that many."""
    try:
        return find(*given)
    except Exception:
        return []


@torch.no_grad()
def _find_suspects(module: nn.Module, x: Tensor, scale: int) -> list[int]:
    """Return the positions whose change moves earlier outputs most, each tried in its own row."""
    positions = _choose_positions(x)
    rows = x[:1].expand(len(positions), -1, -1).clone()
    y = module(x[:1])
    index = torch.arange(len(positions), device=x.device)
    at = torch.tensor(positions, device=x.device)
    # The same numbers as in the trial: a leak of a rare token may show with these only.
    changed = [draw(x[:, s].shape, seed=s + 1)[0] for s in positions]
    rows[index, at] = scale * torch.stack(changed).to(x)
    moved = (module(rows) - y).flatten(2).abs().amax(2).nan_to_num(torch.inf)
    before = torch.arange(x.shape[1], device=x.device) < at[:, None]
    return _pick_worst(positions, moved.where(before, 0).amax(1))


def _find_gradient_suspects(module: nn.Module, x: Tensor) -> list[int]:
    """Return the positions whose outputs have the largest gradients at later positions."""
    positions = _choose_positions(x)
    rows = x[:1].expand(len(positions), -1, -1).clone().requires_grad_()
    y = module(rows)
    if not y.requires_grad:
        return []
    index = torch.arange(len(positions), device=x.device)
    at = torch.tensor(positions, device=x.device)
    outputs = y[index, at]
    (grad,) = torch.autograd.grad((outputs * draw(outputs.shape, seed=0).to(y)).sum(), rows)
    after = torch.arange(x.shape[1], device=x.device) > at[:, None]
    ahead = grad.abs().amax(2).nan_to_num(torch.inf).where(after, 0).amax(1)
    return _pick_worst(positions, ahead)


def _pick_worst(positions: list[int], sizes: Tensor) -> list[int]:
    """Return the positions of the three largest sizes, and the first above rounding."""
    most = sizes.topk(min(3, len(positions))).indices.tolist()
    if not sizes[most[0]] > 0:
        return []
    first = int((sizes >= sizes[most[0]] / 1000).nonzero()[0])
    return sorted({positions[i] for i in (first, *most)})


def _choose_positions(x: Tensor) -> list[int]:
    """Return all positions, or as many as make a batch of moderate size."""
    return _spread(0, x.shape[1] - 1, max(2, min(x.shape[1], TOKENS // x.shape[1])))


def _spread(first: int, last: int, count: int) -> list[int]:
    """Return `count` positions from first to last, evenly spread, or all if there are fewer."""
    if last - first < count:
        return list(range(first, last + 1))
    return sorted({first + round(i * (last - first) / (count - 1)) for i in range(count)})
