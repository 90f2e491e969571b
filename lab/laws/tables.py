"""The law of tables: whatever row an input can select, some input does, and it learns."""

import math
import time
from collections.abc import Iterator

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from lab.laws.adapters.tokens import Tokens
from lab.laws.probes import Probes, draw, longest_input
from lab.laws.reproduction import written
from lab.laws.verdict import Verdict

SCALES = (0.25, 1.0, 4.0, 16.0)
FIRST = 64  # tokens of the first round; each round doubles all before it
EXPECTED = 16  # rows to have been found by chance, before the missing ones are given up
LEAST = 3  # times the tokens that the last new row took
PARAMETRISED = "parametrizations."  # of torch: what makes a weight, not the weight
AT_ONCE = 4096  # tokens in one pass
SEQ_LEN = 16  # or the longest probe's below, or the shortest's above
LONG = 512


def table_reach(module: nn.Module, probes: Probes) -> Verdict:
    """Every row of every table gets a gradient from some input.

    A table is any parameter of two axes or more; a row, all but its last axis. Nothing need be
    said of which are looked up: a map's rows all get a gradient from the first token, those of an
    expert's, a value's or an embedding's table when an input selects them. A table without any
    gradient is left to `gradient reach`, and named; the law does not apply where none has one.

    Inputs of many sizes come in rounds that double their number. Were each of the M rows still
    missing selected as often as the rarest one found, at least once in its N tokens, then 16 N / M
    further tokens would miss them all with a chance of e⁻¹⁶: then, and after 3 N at least, the law
    fails, unless a long sequence shows new rows, which says that positions select. Then, or when
    time is up before, it is not decided. The row of an embedding's `padding_idx`, which torch keeps
    from learning, counts as reached, and so do those beyond the vocabulary.
    """
    law = "table reach"
    tables = {
        name: p
        for name, p in module.named_parameters()
        if p.requires_grad and p.ndim > 1 and PARAMETRISED not in name
    }
    if not tables:
        return Verdict(law, "not applicable", "the module has no trainable parameter of two axes")
    found = {
        name: torch.zeros(p.shape[:-1], dtype=torch.bool, device=p.device)
        for name, p in tables.items()
    }
    for name, row in _unread_rows(module):
        found[name][row] = True
    padded = _n_reached(found)
    began, tokens, newest = time.monotonic(), 0, FIRST
    short = [length for length in probes.lengths if length <= SEQ_LEN]
    like = probes.input(max(short, default=probes.lengths[0]), 1)
    while True:
        n_new, before = max(tokens, FIRST), _n_reached(found)
        _probe(module, tables, found, like, n_new, seed=tokens)
        tokens += n_new
        newest = tokens if _n_reached(found) > before else newest
        if _n_reached(found) == padded:
            words = f"no table gets a gradient from {tokens} tokens: a matter of gradient reach"
            return Verdict(law, "not applicable", words)
        if not _missing(found):
            return Verdict(law, "holds", _counted(found, tokens), measured=0, allowed=0)
        if tokens - newest >= newest * max(LEAST, EXPECTED / _n_missing(found)):
            break
        if time.monotonic() - began > probes.seconds:
            evidence = f"{_counted(found, tokens)}, the last new row after {newest // 2}"
            return Verdict(law, "not decided", evidence)
    unreached = "; ".join(_missing(found))
    evidence, before = f"{_counted(found, tokens)}, no new row after {newest}", _n_reached(found)
    _mark(module, tables, found, longest_input(module, like, LONG), seed=0)
    if _n_reached(found) == before:
        words = f"none of {tokens} tokens reaches {unreached}"
        snippet = _snippet(probes, found, like, tokens, words)
        return Verdict(law, "fails", evidence, words, _n_missing(found), 0, snippet)
    evidence += f", but {_n_reached(found) - before} more with a longer sequence"
    return Verdict(law, "not decided" if _missing(found) else "holds", evidence)


def _unread_rows(module: nn.Module) -> Iterator[tuple[str, int | slice]]:
    """Yield trainable tables, and rows no probe can select: of padding, beyond the vocabulary."""
    for path, part in module.named_modules():
        row = part.padding_idx if isinstance(part, nn.Embedding) else None
        if row is not None and part.get_parameter("weight").requires_grad:
            yield f"{path}.weight".removeprefix("."), row
        if isinstance(part, Tokens) and part.table is not None:
            name = ".".join(filter(None, (path, "module", part.table, "weight")))
            if module.get_parameter(name).requires_grad:
                yield name, slice(part.vocab_size, None)


def _probe(
    module: nn.Module,
    tables: dict[str, nn.Parameter],
    found: dict[str, Bool[Tensor, "..."]],
    like: Tensor,
    n_tokens: int,
    seed: int,
) -> None:
    """Mark the rows that get a gradient from so many further tokens."""
    length, d_model = like.shape[1:]
    for first in range(0, n_tokens, AT_ONCE):
        rows = math.ceil(min(AT_ONCE, n_tokens) / length)
        scale = torch.tensor(SCALES).repeat(math.ceil(rows / len(SCALES)))[:rows]
        x = draw((rows, length, d_model), seed + first) * scale[:, None, None]
        _mark(module, tables, found, x.to(like), seed + first + 1)


def _mark(
    module: nn.Module,
    tables: dict[str, nn.Parameter],
    found: dict[str, Bool[Tensor, "..."]],
    x: Tensor,
    seed: int,
) -> None:
    """Mark the rows that get a gradient from an input."""
    y = module(x)
    if not y.requires_grad:
        return
    weighed = (y * draw(y.shape, seed).to(y)).sum()
    grads = torch.autograd.grad(weighed, list(tables.values()), allow_unused=True)
    for name, grad in zip(tables, grads, strict=True):
        if grad is not None:
            found[name] |= (grad != 0).any(dim=-1)


def _snippet(
    probes: Probes, found: dict[str, Bool[Tensor, "..."]], like: Tensor, tokens: int, words: str
) -> str:
    names = [name for name, rows in found.items() if rows.any() and not rows.all()]
    body = f"""
        tables = {{name: module.get_parameter(name) for name in {names}}}
        found = {{name: torch.zeros(p.shape[:-1], dtype=torch.bool) for name, p in tables.items()}}
        like = torch.zeros({tuple(like.shape)}, dtype={like.dtype})
        _probe(module, tables, found, like, {tokens}, seed=0)
        print("rows that get a gradient from {tokens} tokens:")
        for name, rows in found.items():
            print(name, int(rows.sum()), "of", rows.numel())
        sys.exit(not all(rows.all() for rows in found.values()))
    """
    return written(probes.origin, (draw, _probe), body, f"table reach: {words}")


def _n_reached(found: dict[str, Bool[Tensor, "..."]]) -> int:
    return sum(int(rows.sum()) for rows in found.values())


def _n_missing(found: dict[str, Bool[Tensor, "..."]]) -> int:
    """Return how many rows of one table lack a gradient: tables share what selects their rows."""
    return max(int((~rows).sum()) for rows in found.values() if rows.any())


def _missing(found: dict[str, Bool[Tensor, "..."]]) -> list[str]:
    """Name the rows that got no gradient, of the tables where some did."""
    return [_named(name, rows) for name, rows in found.items() if rows.any() and not rows.all()]


def _counted(found: dict[str, Bool[Tensor, "..."]], tokens: int) -> str:
    n_rows = sum(rows.numel() for rows in found.values() if rows.any())
    without = ", ".join(name for name, rows in found.items() if not rows.any())
    words = f"{_n_reached(found)} of {n_rows} rows got a gradient from {tokens} tokens"
    return f"{words}, leaving out {without} without any" if without else words


def _named(name: str, rows: Bool[Tensor, "..."]) -> str:
    absent = (~rows).nonzero().tolist()
    first = ", ".join(str(index[0] if len(index) == 1 else index) for index in absent[:3])
    return f"{len(absent)} of {rows.numel()} rows of {name}: {first}{' …' * (len(absent) > 3)}"
