"""Shortcuts that several tasks share: predictors that look right without solving a task."""

from collections import Counter
from functools import lru_cache

from tasks import counter
from tasks.base import IGNORE, Batch, Predictor, Task, count_rows
from tasks.lazy import Tensor, torch

TABLE_ROWS = 2048
"""Training rows at most, and their tokens, that tables of frequent answers are counted on."""
TABLE_TOKENS = 2**20
CONTEXT_TOKENS = 2**19
"""Training tokens that tables of contexts are counted on."""


def find_followers(inputs: Tensor, *, latest: bool) -> Tensor:
    """Return the token after the first or latest earlier occurrence of each token (else -100)."""
    answers = []
    for row in inputs.tolist():
        seen: dict[int, int] = {}
        answer = []
        for position, token in enumerate(row):
            answer.append(row[seen[token] + 1] if token in seen else IGNORE)
            if latest or token not in seen:
                seen[token] = position
        answers.append(answer)
    return torch.tensor(answers, device=inputs.device)


def copy_latest_match(batch: Batch) -> Tensor:
    """Copy what followed the latest earlier occurrence of the token, int64 [b t] (else -100)."""
    return find_followers(batch.inputs, latest=True)


def copy_first_match(batch: Batch) -> Tensor:
    """Copy what followed the first earlier occurrence of the token, int64 [b t] (else -100)."""
    return find_followers(batch.inputs, latest=False)


def copy_two_token_match(batch: Batch) -> Tensor:
    """Copy what followed the first earlier occurrence of the last two tokens, int64 [b t].

    Where that pair is new, return what `copy_first_match` does.
    """
    answers, n = copy_first_match(batch), int(batch.inputs.max()) + 1
    followed = find_followers(batch.inputs[:, :-1] * n + batch.inputs[:, 1:], latest=False)
    answers[:, 1:] = (followed % n).where(followed != IGNORE, answers[:, 1:])
    return answers


def predict_most_frequent(lowest: int) -> Predictor:
    """Return a predictor of a row's most frequent token ≥ lowest; the first of equally frequent."""

    def rule(batch: Batch) -> Tensor:
        answers = torch.full_like(batch.inputs, IGNORE)
        for row, answer in zip(batch.inputs.tolist(), answers, strict=True):
            for token, _ in Counter(token for token in row if token >= lowest).most_common(1):
                answer[:] = token
        return answers

    return rule


def look_back(by: int) -> Predictor:
    """Return a predictor of the token `by` positions before (-100 where there is none)."""
    return lambda batch: torch.nn.functional.pad(batch.inputs, (by, -by), value=IGNORE)


def look_at(position: int) -> Predictor:
    """Return a predictor that answers everywhere with the token at one position of the row."""
    return lambda batch: batch.inputs[:, position, None].expand_as(batch.inputs)


def draw_numbers(name: str, inputs: Tensor, n: int) -> Tensor:
    """Draw a number in 0 … n − 1 for each position, int64 [b t], from a stream of this name."""
    rows = torch.arange(len(inputs), device=inputs.device)
    return counter.draw_below(
        counter.draw_words(counter.derive_key(name, 0), 0, rows, inputs.shape[1]), n
    )


def pick_stored_value(n_stored: int, width: int) -> Predictor:
    """Return a predictor that answers with a stored value at random.

    Args:
        n_stored: number of values stored, from the row's first position on.
        width: tokens that each takes; the last is the value.
    """

    def rule(batch: Batch) -> Tensor:
        which = draw_numbers("context value", batch.inputs, n_stored)
        return batch.inputs.gather(1, width * which + width - 1)

    return rule


def predict_by_token(task: Task) -> Predictor:
    """Return a predictor of what is most often right at positions with the same token."""
    return lambda batch: look_up(_tabulate(task, by_position=False), batch.inputs)


def predict_by_position(task: Task) -> Predictor:
    """Return a predictor of what is most often right at the same position."""

    def rule(batch: Batch) -> Tensor:
        t = batch.inputs.shape[1]
        positions = torch.arange(t, device=batch.inputs.device).expand_as(batch.inputs)
        return look_up(_tabulate(task, by_position=True), positions)

    return rule


def predict_by_context(task: Task, order: int) -> Predictor:
    """Return a predictor of what is most often next after the last `order` tokens, or after fewer.

    For tasks that score every position; V^order times V is below 2⁶³.
    """

    def rule(batch: Batch) -> Tensor:
        answers = torch.full_like(batch.inputs, IGNORE)
        for n, table in enumerate(_tabulate_contexts(task, order)):
            found = look_up(table, encode_contexts(batch.inputs, n, task.vocab_size))
            later = answers[:, max(0, n - 1) :]
            later.copy_(found.where(found != IGNORE, later))
        return answers

    return rule


def tabulate_most_frequent(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features in order, and the most frequent target of each.

    Of equally frequent targets it is the lowest.

    Args:
        features: int64, ≥ 0, of any shape; times the largest target below 2⁶³.
        targets: int64 of the same shape, ≥ 0.
    """
    n = int(targets.max()) + 1
    pairs, counts = count_each((features * n).add_(targets))
    # Pairs are in order, and the sorts are stable: of equally frequent targets the lowest leads.
    pairs = pairs[counts.argsort(descending=True, stable=True)]
    pairs = pairs[(pairs // n).argsort(stable=True)]
    feature, target = pairs // n, pairs % n
    first = torch.ones_like(feature, dtype=torch.bool)
    first[1:] = feature[1:] != feature[:-1]
    return feature[first], target[first]


def count_each(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different values in order, and how often each occurs, as `Tensor.unique` does.

    The values may be sorted in place. `Tensor.unique` and `Tensor.sort` take memory that estimates
    do not see: a sort as much again as what it returns.
    """
    flat = values.flatten()
    if flat.device.type == "cpu":
        flat.numpy().sort()
    else:
        flat = flat.sort().values
    return flat.unique_consecutive(return_counts=True)


def look_up(table: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    """Look up the answer for each wanted feature, -100 where the table of `most_frequent` has none.

    Args:
        table: features and answers, from `tabulate_most_frequent`.
        wanted: int64 of any shape.
    """
    features, answers = (column.to(wanted.device) for column in table)
    place = torch.searchsorted(features, wanted.contiguous()).clamp_(max=len(features) - 1)
    missing = features[place] != wanted
    return answers[place].masked_fill_(missing, IGNORE)


@lru_cache(maxsize=64)
def _tabulate(task: Task, *, by_position: bool) -> tuple[Tensor, Tensor]:
    """Tabulate the most frequent answer at each position or token of the first training rows."""
    batch = task.batch(size=count_rows(TABLE_TOKENS, task.seq_len, most=TABLE_ROWS))
    row, position = (batch.targets != IGNORE).nonzero(as_tuple=True)
    feature = position if by_position else batch.inputs[row, position]
    return tabulate_most_frequent(feature, batch.targets[row, position])


@lru_cache(maxsize=16)
def _tabulate_contexts(task: Task, order: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """Tabulate the most frequent token after each context, for contexts of 0 … order tokens."""
    batch = task.batch(size=count_rows(CONTEXT_TOKENS, task.seq_len))
    return tuple(
        tabulate_most_frequent(
            encode_contexts(batch.inputs, n, task.vocab_size), batch.targets[:, max(0, n - 1) :]
        )
        for n in range(min(order, task.seq_len) + 1)
    )


def encode_contexts(inputs: Tensor, order: int, base: int) -> Tensor:
    """Return the last `order` tokens at each position from order − 1 on, as one number."""
    code = torch.zeros_like(inputs[:, max(0, order - 1) :])
    for k in range(order):  # one by one: together they would take `order` times the memory
        code.add_(inputs[:, k : k + code.shape[1]], alpha=base**k)
    return code
