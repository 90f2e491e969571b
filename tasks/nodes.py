"""Nodes of the graphs that rows show: how many there are, their names, and rows of such names.

Axes: b row, n node, l token of a name, w place in a row that still has gaps.
"""

from functools import lru_cache
from itertools import accumulate
from math import log2, sqrt

from jaxtyping import Bool, Int64

from tasks import counter
from tasks.bounds import check_range
from tasks.lazy import Tensor, torch

MAX_NAMES = 2**16
"""Names that `counter.Race` can draw from."""


def check_least(min_nodes: int | None, n_nodes: int) -> None:
    """Check that the fewest nodes of a row are at least 3, and no more than the most.

    Raises:
        ValueError: naming field, value and bound.
    """
    if min_nodes is not None:
        check_range("min_nodes", min_nodes, 3, n_nodes, "n_nodes")


def draw_count(
    word: Int64[Tensor, "b 1"], min_nodes: int | None, n_nodes: int
) -> Int64[Tensor, "b 1"]:
    """Draw the number of nodes n of each row, min_nodes … n_nodes, with p ∝ 1/(n + √n_nodes).

    Without `min_nodes` every row has n_nodes.
    """
    fewest = n_nodes if min_nodes is None else min_nodes
    weight = [1 / (n + sqrt(n_nodes)) for n in range(fewest, n_nodes + 1)]
    ends = [int(2**32 * end / sum(weight)) for end in accumulate(weight)]
    ends = torch.tensor(ends[:-1], dtype=torch.int64, device=word.device)
    return fewest + torch.searchsorted(ends, word & 0xFFFFFFFF, right=True)


def draw_order_of_used(
    word: Int64[Tensor, "b n"], used: Bool[Tensor, "b n"]
) -> Int64[Tensor, "b n"]:
    """Draw a random order of the items in use; the others follow them."""
    return counter.draw_order((word >> 1).masked_fill(~used, 2**63 - 1))


def count_names(n_letters: int, min_len: int, max_len: int) -> int:
    """Return how many names of min_len … max_len letters there are."""
    return sum(n_letters**length for length in range(min_len, max_len + 1))


def draw_names(
    word: Int64[Tensor, "b i"], n_nodes: int, n_letters: int, min_len: int, max_len: int
) -> Int64[Tensor, "b n l"]:
    """Draw different names for the nodes of each row; 0 fills those that are shorter.

    A name is drawn by its length, uniform, and then letter by letter, until it is a new one. A
    letter is 1 … n_letters; as the last of a name it is n_letters larger.

    Args:
        word: `count_names` words for each row.
        n_nodes: how many names.
        n_letters: letters to choose from.
        min_len: letters of the shortest name.
        max_len: of the longest.
    """
    race, spelled = _list_names(n_letters, min_len, max_len, word.device)
    return spelled[race.order(word)[:, :n_nodes]]


@lru_cache(maxsize=16)
def _list_names(
    n_letters: int, min_len: int, max_len: int, device: "torch.device"
) -> tuple[counter.Race, Int64[Tensor, "i l"]]:
    """Return all names, and a race among them in which each length is as likely."""
    spelled, weight = [], []
    for length in range(min_len, max_len + 1):
        number = torch.arange(n_letters**length)
        power = n_letters ** torch.arange(length)
        name = 1 + number[:, None] // power % n_letters
        name[:, -1] += n_letters
        spelled.append(torch.nn.functional.pad(name, (0, max_len - length)))
        weight.append(torch.full((len(name),), -length * log2(n_letters), dtype=torch.float64))
    return counter.Race.from_log_weights(torch.cat(weight), device), torch.cat(spelled).to(device)


def close_gaps(token: Int64[Tensor, "b w"], seq_len: int) -> Int64[Tensor, "b w"]:
    """Return the position of each token in rows without the zeros; seq_len for a zero."""
    return ((token > 0).cumsum(1) - 1).where(token > 0, seq_len)
