"""Do rotary positions prevent recall? Codes are trained for matching at the task's distances.

Recall by content needs a layer in which a query's code matches its key's over any distance in the
task. If every layer rotates all channels that it matches in, fast rotations blur the match. To
measure how much, free codes for keys and queries are rotated as the layers do and trained for
nothing but this match. It is an empirical bound: better codes may exist, but a model has to learn
its own from tokens, together with everything else.

Axis letters of this file, in addition to the package's: q asked query, k stored key, w channel.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.intervals import clustered_wilson
from lab.models import LanguageModel
from lab.ops.rope import apply_rotary, rotary_table
from lab.training.diagnosis.failed_run import FailedRun, Look
from lab.training.optimizers import AdamW
from tasks.base import Task
from tasks.mixture import Mixture

STEPS, SECONDS = 400, 12.0
"""Maximum number of steps of training codes, and maximum seconds of processor time."""
RATE = 0.1
SCORES = 2**17
"""Maximum number of products of a query and a key in a batch."""
FRESH_BATCHES = 8
MARGIN = 0.1
"""How far below the goal the codes must stay, to conclude that positions prevent recall."""


@dataclass(frozen=True)
class Rotation:
    """Channels that are rotated alike.

    Attributes:
        base: wavelength base.
        width: channels of a head, or of a group's state.
        copies: how many heads or groups there are.
    """

    base: float
    width: int
    copies: int


def look(failed: FailedRun, accuracy: float | None) -> Look:
    """Look whether codes trained for matching alone fall short of the goal, as the run did.

    Args:
        failed: the run.
        accuracy: what it reached on rows of its last stage.
    """
    turned = list_rotations(failed.state.model)
    if not turned:
        return Look(False, "some layer matches without rotation, or none matches at all")
    task = failed.stage.task
    places = _find_places(task)
    if places is None:
        return Look(False, "the rows do not ask for keys that are stored once each")
    found = measure_reach(turned, places, failed.goal)
    if found is None:
        return Look(False, f"training codes for matching alone takes more than {SECONDS:.0f} s")
    low, high = found["interval"]
    channels = sum(part.width * part.copies for part in turned)
    says = (
        f"codes trained for matching alone, in all {channels} rotated channels of the layers, "
        f"reach {found['reached']:.2f} ({low:.2f} … {high:.2f}) at these distances; "
        f"{failed.goal:.2f} is required"
    )
    short = high + max(0.0, found["gain"]) < failed.goal - MARGIN
    above = accuracy is not None and accuracy > high
    return Look(short and not above, says, {**found, "channels": channels, "goal": failed.goal})


def list_rotations(model: LanguageModel) -> list[Rotation]:
    """Return how the model's layers rotate; empty if one of them mixes tokens without rotation."""
    found = []
    for block in model.list_blocks():
        if block.mixer is None:
            continue
        rotary = block.mixer.rotary_pairs
        if rotary is None:
            return []
        found.append(Rotation(rotary.base, 2 * rotary.n_pairs, len(rotary.source_of)))
    return found


Places = Callable[[str, int, int], tuple[Tensor, Tensor]]
"""(split, first row, rows) → positions of queries and of their keys, int64 [b k] each."""


def _find_places(task: Task) -> Places | None:
    """Return the positions of a task's queries and keys, if each key is stored once in a row."""
    batch = task.batch(size=8)
    if isinstance(task, Mixture) or not {"query_pos", "key_pos"} <= batch.links.keys():
        return None
    query, key = batch.links["query_pos"], batch.links["key_pos"]
    if query.shape != key.shape or query.shape[1] < 2 or min(query.min(), key.min()) < 0:
        return None
    asked, stored = batch.inputs.gather(1, query), batch.inputs.gather(1, key)
    ordered = stored.sort(1).values
    if not asked.equal(stored) or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        return None

    def places(split: str, start: int, size: int) -> tuple[Tensor, Tensor]:
        links = task.batch(split=split, start=start, size=size).links
        return links["query_pos"], links["key_pos"]

    return places


def measure_reach(turned: list[Rotation], places: Places, goal: float) -> dict | None:
    """Return the accuracy that codes trained for matching alone reach on fresh rows.

    The score of query q and key k is the sum, over the channels of all layers, of the products of
    their codes, each rotated to its position. There are as many codes as a row has keys: fewer than
    a task's vocabulary, so that they are no harder to tell apart. Training stops at the goal.

    Args:
        turned: how channels are rotated.
        places: of the task.
        goal: accuracy at which training stops.

    Returns:
        reached, its 95 % interval, the gain of the last quarter of training over the one before,
        steps, and scored queries; None if time ran out.
    """
    n_keys = places("train", 0, 1)[0].shape[1]
    rows = max(1, min(64, SCORES // n_keys**2))
    width = sum(part.width * part.copies for part in turned)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(2, n_keys, width, generator=generator).mul_(width**-0.25)
    codes.requires_grad_()
    optimizer = AdamW([codes], lr=RATE, weight_decay=0.0)
    began, right = time.thread_time(), []
    for step in range(STEPS):
        if time.thread_time() - began > SECONDS:
            return None
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        scores, answers = _score_matches(
            codes, turned, places("train", step * rows, rows), generator
        )
        loss = F.cross_entropy(scores.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.append((scores.argmax(-1) == answers).float().mean().item())
        if step % 25 == 24 and sum(right[-10:]) / 10 >= goal:
            break
    hits = []
    with torch.no_grad():
        for start in range(0, FRESH_BATCHES * rows, rows):
            positions = places("validation", start, rows)
            scores, answers = _score_matches(codes, turned, positions, generator)
            hits.append((scores.argmax(-1) == answers).sum(1))
    count = torch.cat(hits)
    quarter = max(1, len(right) // 4)
    return {
        "reached": int(count.sum()) / (len(count) * n_keys),
        "interval": list(clustered_wilson(count, torch.full_like(count, n_keys))),
        "gain": (sum(right[-quarter:]) - sum(right[-2 * quarter : -quarter])) / quarter,
        "steps": len(right),
        "scored": len(count) * n_keys,
    }


def _score_matches(
    codes: Tensor,
    turned: list[Rotation],
    positions: tuple[Tensor, Tensor],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return the scores [b q k] of queries and keys of freshly drawn words, and the answers."""
    query_pos, key_pos = positions
    b, n_keys = key_pos.shape
    words = torch.rand(b, n_keys, generator=generator).argsort(1)
    queries, keys = (
        _rotate_codes(table[words], place, turned)
        for table, place in zip(codes, (query_pos, key_pos), strict=True)
    )
    later = key_pos[:, None, :] > query_pos[:, :, None]
    scores = (queries @ keys.mT).masked_fill(later, float("-inf"))
    return scores, torch.arange(n_keys).expand(b, -1)


def _rotate_codes(codes: Tensor, positions: Tensor, turned: list[Rotation]) -> Tensor:
    """Return codes [b k w] with each layer's channels rotated to the positions."""
    parts, first = [], 0
    for part in turned:
        own = codes[..., first : first + part.width * part.copies]
        cos, sin = rotary_table(positions, part.width, part.base)
        parts.append(apply_rotary(own.unflatten(-1, (part.copies, -1)), cos, sin).flatten(-2))
        first += part.width * part.copies
    return torch.cat(parts, -1)
