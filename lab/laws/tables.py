"""The law of tables: every row of a table is selected by some input, and learns."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from lab.laws.law import Law, Verdict, read_clock
from lab.laws.probes import Probes, draw, draw_longest, move_constants
from lab.laws.reproduction import write_program
from lab.laws.tokens import Tokens

SCALES = (0.25, 1.0, 4.0, 16.0)
FIRST = 64
"""Tokens of the first round; each further round has as many as all before it."""
EXPECTED = 16
"""Missing rows that would be expected to appear by chance before the search stops."""
LEAST = 3
"""Least further tokens before the search stops, as a multiple of those up to the last new row."""
PARAMETRISED = "parametrizations."
"""Part of the names of parameters from which torch computes a weight."""
AT_ONCE = 4096
"""Tokens in one pass."""
OPTIONAL = ("token_type_embeddings", "task_type_embeddings")
"""Tables of BERT and its kin, of which an optional input selects other rows than the first."""
SEQ_LEN = 16
"""Longest probe that inputs take their length from; the shortest probe if all are longer."""
LONG = 512


def judge(module: nn.Module, probes: Probes) -> Verdict:
    """Every row of every table gets a gradient from some input.

    A table is any parameter of two or more axes; a row is one index into all axes but the last. It
    need not be known which parameters are looked up: the rows of a linear map all get a gradient
    from the first token, the rows of a table of experts, values or embeddings when an input selects
    them. A table without any gradient is left to "gradient reach", and named; the law does not
    apply where no table has one.

    Inputs of many sizes come in rounds that double their number. Suppose that each of the M missing
    rows were selected as often as the rarest row found, at least once in its N tokens. Then 16 N/M
    further tokens would miss all of them with probability e⁻¹⁶. After so many tokens, and at least
    3 N, the law fails, unless a long sequence reaches new rows, which means that positions select
    them. In that case, or when time is up before, the law is not decided. Three kinds of rows count
    as reached: the row of an embedding's `padding_idx`, which torch keeps from learning, rows
    beyond the vocabulary, and those of `OPTIONAL` tables.

    Keys or routers that are initialised to one value choose the same rows for every token, until a
    step parts them: the law fails, and the evidence says whether all rows are reached with constant
    parameters moved.
    """
    began = read_clock()
    found = _judge_as_is(module, probes, began)
    if found.verdict != "fails":
        return found
    moved = _judge_as_is(move_constants(module, seed=0), probes, began)
    words = moved.counterexample or moved.evidence
    if moved.verdict == "holds":
        words += ": a first step may part equal choices"
    return replace(found, evidence=f"{found.evidence}; with constant parameters moved, {words}")


LAW = Law("table reach", judge)


def _judge_as_is(module: nn.Module, probes: Probes, began: float) -> Verdict:
    """Judge a module with its present weights, in what is left of the time since `began`."""
    tables = {
        name: p
        for name, p in module.named_parameters()
        if p.requires_grad and p.ndim > 1 and PARAMETRISED not in name
    }
    if not tables:
        words = "the module has no trainable parameter of two axes"
        return Verdict(LAW.name, "not applicable", words)
    found = {
        name: torch.zeros(p.shape[:-1], dtype=torch.bool, device=p.device)
        for name, p in tables.items()
    }
    names = {id(table): name for name, table in tables.items()}  # a shared table has one of two
    for table, row in _list_unselectable(module):
        if id(table) in names:
            found[names[id(table)]][row] = True
    unselectable = _count_reached(found)
    tokens, newest = 0, FIRST
    short = [length for length in probes.lengths if length <= SEQ_LEN]
    like = probes.input(max(short, default=probes.lengths[0]), 1)
    while True:
        n_new, before = max(tokens, FIRST), _count_reached(found)
        try_tokens(module, tables, found, like, n_new, seed=tokens)
        tokens += n_new
        newest = tokens if _count_reached(found) > before else newest
        if _count_reached(found) == unselectable:
            words = f"no table gets a gradient from {tokens} tokens, which gradient reach judges"
            return Verdict(LAW.name, "not applicable", words)
        if not _list_missing(found):
            evidence = _describe_counts(found, tokens)
            return Verdict(LAW.name, "holds", evidence, measured=0, allowed=0)
        if tokens - newest >= newest * max(LEAST, EXPECTED / _count_missing(found)):
            break
        if read_clock() - began > probes.settings.seconds:
            evidence = f"{_describe_counts(found, tokens)}, the last new row after {newest // 2}"
            return Verdict(LAW.name, "not decided", evidence)
    unreached, before = "; ".join(_list_missing(found)), _count_reached(found)
    evidence = f"{_describe_counts(found, tokens)}, no new row after {newest}"
    mark_rows(module, tables, found, draw_longest(module, like, LONG), seed=0)
    if _count_reached(found) == before:
        words = f"none of {tokens} tokens reaches {unreached}"
        snippet = _write_snippet(probes, found, like, tokens, words)
        return Verdict(LAW.name, "fails", evidence, words, _count_missing(found), 0, snippet)
    evidence += f", but {_count_reached(found) - before} more with a longer sequence"
    return Verdict(LAW.name, "not decided" if _list_missing(found) else "holds", evidence)


def _list_unselectable(module: nn.Module) -> Iterator[tuple[Tensor, int | slice]]:
    """Yield tables and their rows that no probe can select, as `judge` says."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding):
            if part.padding_idx is not None:
                yield part.weight, part.padding_idx
            if path.endswith(OPTIONAL):
                yield part.weight, slice(1, None)
        if isinstance(part, Tokens) and part.table is not None:
            name = ".".join(filter(None, (path, "module", part.table, "weight")))
            yield module.get_parameter(name), slice(part.vocab_size, None)


def try_tokens(
    module: nn.Module,
    tables: dict[str, nn.Parameter],
    found: dict[str, Bool[Tensor, "..."]],
    like: Tensor,
    n_tokens: int,
    seed: int,
) -> None:
    """Mark the rows that get a gradient from `n_tokens` further tokens."""
    length, d_model = like.shape[1:]
    for first in range(0, n_tokens, AT_ONCE):
        rows = math.ceil(min(AT_ONCE, n_tokens) / length)
        scale = torch.tensor(SCALES).repeat(math.ceil(rows / len(SCALES)))[:rows]
        x = draw((rows, length, d_model), seed + first) * scale[:, None, None]
        mark_rows(module, tables, found, x.to(like), seed + first + 1)


def mark_rows(
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
    weighted = (y * draw(y.shape, seed).to(y)).sum()
    grads = torch.autograd.grad(weighted, list(tables.values()), allow_unused=True)
    for name, grad in zip(tables, grads, strict=True):
        if grad is not None:
            found[name] |= ((grad != 0) & grad.isfinite()).any(dim=-1)


def _write_snippet(
    probes: Probes, found: dict[str, Bool[Tensor, "..."]], like: Tensor, tokens: int, words: str
) -> str:
    names = [name for name, rows in found.items() if rows.any() and not rows.all()]
    body = f"""
        tables = {{name: module.get_parameter(name) for name in {names}}}
        found = {{name: torch.zeros(p.shape[:-1], dtype=torch.bool) for name, p in tables.items()}}
        like = torch.zeros({tuple(like.shape)}, dtype={like.dtype})
        try_tokens(module, tables, found, like, {tokens}, seed=0)
        print("rows that get a gradient from {tokens} tokens:")
        for name, rows in found.items():
            print(name, int(rows.sum()), "of", rows.numel())
        sys.exit(not all(rows.all() for rows in found.values()))
    """
    return write_program(probes.origin, (draw, try_tokens), body, f"{LAW.name}: {words}")


def _count_reached(found: dict[str, Bool[Tensor, "..."]]) -> int:
    return sum(int(rows.sum()) for rows in found.values())


def _count_missing(found: dict[str, Bool[Tensor, "..."]]) -> int:
    """Return the most rows of one table without a gradient: one index may select from several."""
    return max(int((~rows).sum()) for rows in found.values() if rows.any())


def _list_missing(found: dict[str, Bool[Tensor, "..."]]) -> list[str]:
    """Describe the rows that got no gradient, of the tables where some did."""
    return [
        _describe_missing(name, rows)
        for name, rows in found.items()
        if rows.any() and not rows.all()
    ]


def _describe_counts(found: dict[str, Bool[Tensor, "..."]], tokens: int) -> str:
    n_rows = sum(rows.numel() for rows in found.values() if rows.any())
    without = ", ".join(name for name, rows in found.items() if not rows.any())
    words = f"{_count_reached(found)} of {n_rows} rows got a gradient from {tokens} tokens"
    return f"{words} (not counting {without}, which got none at all)" if without else words


def _describe_missing(name: str, rows: Bool[Tensor, "..."]) -> str:
    absent = (~rows).nonzero().tolist()
    first = ", ".join(str(index[0] if len(index) == 1 else index) for index in absent[:3])
    return f"{len(absent)} of {rows.numel()} rows of {name}: {first}{' …' * (len(absent) > 3)}"
