"""Rows of a task: tokens, targets, roles, and links between positions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tasks.lazy import Tensor, torch

IGNORE = -100
"""The target of a position that is not scored (the convention of torch's cross-entropy)."""


class Links(Mapping[str, Tensor]):
    """Tensors by name, made when one is first looked at: training mostly needs none of them.

    Args:
        make: returns those that are to be made.
        known: those that are there already, and can be had without making the others.
    """

    def __init__(
        self,
        make: Callable[[], dict[str, Tensor]],
        known: Mapping[str, Tensor] | None = None,
    ):
        self._make, self.known = make, dict(known or {})

    @cached_property
    def _made(self) -> dict[str, Tensor]:
        return {**self._make(), **self.known}

    def __getitem__(self, name: str) -> Tensor:
        return self.known[name] if name in self.known else self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self):
        # What makes them may be a closure: they are made, and travel as they are.
        return Links, (dict, dict(self))


def _changed(links: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> Links:
    """Return links each of which is changed when it is looked at."""
    known = links.known if isinstance(links, Links) else links
    return Links(
        lambda: {name: change(link) for name, link in links.items()},
        {name: change(link) for name, link in known.items()},
    )


@dataclass(frozen=True)
class Batch:
    """Rows of a task.

    Attributes:
        inputs: int64 [b t], token ids.
        targets: int64 [b t], the right answer at scored positions, -100 elsewhere.
        roles: int64 [b t], an index into the task's `role_names`.
        links: int64 tensors that tie positions of a row together, task by task; -1 pads.
    """

    inputs: Tensor
    targets: Tensor
    roles: Tensor
    links: Mapping[str, Tensor]

    def __getitem__(self, rows: slice) -> "Batch":
        """Return some of the rows."""
        return self.taken(rows, self.inputs.shape[1])

    def taken(self, rows: slice | Tensor, seq_len: int) -> "Batch":
        """Return some of the rows, by slice or by number, and their first seq_len positions."""
        return Batch(
            self.inputs[rows, :seq_len],
            self.targets[rows, :seq_len],
            self.roles[rows, :seq_len],
            _changed(self.links, lambda link: link[rows]),
        )

    def trimmed(self) -> "Batch":
        """Return the batch without the columns behind the last that any row scores."""
        scored = (self.targets != IGNORE).any(0).nonzero()
        return self.taken(slice(None), int(scored[-1]) + 1) if len(scored) else self

    def to(self, device: "torch.device | str") -> "Batch":
        """Return the same rows on another device."""
        return Batch(
            self.inputs.to(device),
            self.targets.to(device),
            self.roles.to(device),
            _changed(self.links, lambda link: link.to(device)),
        )


def accuracy(predicted: Tensor, targets: Tensor) -> float:
    """Return the share of scored positions where `predicted` [b t] equals `targets` [b t]."""
    scored = targets != IGNORE
    return (predicted[scored] == targets[scored]).double().mean().item()


def joined(
    links: Sequence[Mapping[str, Tensor]], order: Tensor, like: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Put the links of several batches together, padded with -1 to the widest.

    Args:
        links: of each batch, all of the same names.
        order: which of the rows, laid end to end, comes where.
        like: links whose widths count too.
    """
    whole = {}
    for name in links[0]:
        shapes = zip(*(found[name].shape[1:] for found in [*links, *like]), strict=True)
        widest = [max(sizes) for sizes in shapes]
        whole[name] = torch.cat([_widened(found[name], widest) for found in links])[order]
    return whole


def _widened(link: Tensor, sizes: list[int]) -> Tensor:
    """Pad every axis but the rows' with -1 at its end."""
    missing = [size - now for size, now in zip(sizes, link.shape[1:], strict=True)]
    ends = [n for end in reversed(missing) for n in (0, end)]
    return torch.nn.functional.pad(link, ends, value=-1)
