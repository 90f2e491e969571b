"""What a foreign language model is made of: layers, and in each its mixer, MLP and norms.

Found by running the model once and watching which part reads what another one returned, so that
names do not matter.
"""

from collections.abc import Iterable
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lab.foreign.mixer import Call, is_close, split_call


class Seen(NamedTuple):
    """One call of a part: its name in the layer, what it read, what beside, what it returned."""

    name: str
    part: nn.Module
    given: Tensor
    call: Call
    returned: Tensor


class Parts(NamedTuple):
    """The parts of one layer.

    Attributes:
        layer: the layer.
        mixers: the parts that move information between positions, mostly one.
        norm_mixer: makes the first mixer's input of the residual stream; None: it reads that as is.
        mlps: the parts that do not, mostly one.
        norm_mlp: makes the first MLP's input.
        middle: whether the first MLP, or the norm before it, reads the residual stream between
            mixers and MLPs; it does not where both are computed side by side.
        alone: whether the layer has no part beside one mixer.
    """

    layer: nn.Module
    mixers: list[Seen]
    norm_mixer: nn.Module | None
    mlps: list[Seen]
    norm_mlp: nn.Module | None
    middle: bool
    alone: bool


class Recorder:
    """Records the calls of some modules in one run."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]):
        self.seen: list[Seen] = []
        self.handles = [
            module.register_forward_hook(self._build_hook(name), with_kwargs=True)
            for name, module in modules
        ]

    def _build_hook(self, name: str) -> Any:
        def record(part: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
            if args or "hidden_states" in kwargs:
                given, call = split_call(args, kwargs)
                first = returned[0] if isinstance(returned, tuple) else returned
                if isinstance(given, Tensor) and isinstance(first, Tensor):
                    self.seen.append(Seen(name, part, given, call, first))

        return record

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def find_source(self, tensor: Tensor) -> Seen | None:
        """Return the norm that returned a tensor; None if no norm did."""
        norms = (seen for seen in self.seen if is_norm(seen.part))
        return next((seen for seen in norms if is_same(seen.returned, tensor)), None)


def find_layers(backbone: nn.Module, depth: int) -> nn.ModuleList:
    """Return the list of a model's layers.

    Raises:
        ValueError: for a model without one.
    """
    lists = (m for m in backbone.modules() if isinstance(m, nn.ModuleList) and len(m) == depth)
    found = next(lists, None)
    if found is None:
        raise ValueError(
            f"model={type(backbone).__name__}: no nn.ModuleList holds the {depth} layers of its "
            "configuration"
        )
    return found


def find_parts(backbone: nn.Module, layers: nn.ModuleList, x: Tensor) -> list[Parts]:
    """Return the parts of each layer, found by running the model on embeddings x [b t d].

    Raises:
        ValueError: for a layer without a mixer.
    """
    recorders = [Recorder(layer.named_children()) for layer in layers]
    try:
        with torch.no_grad():
            backbone(inputs_embeds=x, use_cache=False)
    finally:
        for recorder in recorders:
            recorder.stop()
    return [_read(layer, rec) for layer, rec in zip(layers, recorders, strict=True)]


def find_final_norm(backbone: nn.Module, x: Tensor) -> nn.Module:
    """Return the norm that gives the last hidden state; an identity where there is none."""
    recorder = Recorder((name, m) for name, m in backbone.named_modules() if is_norm(m))
    try:
        with torch.no_grad():
            last = backbone(inputs_embeds=x, use_cache=False).last_hidden_state
    finally:
        recorder.stop()
    source = recorder.find_source(last)
    return nn.Identity() if source is None else source.part


def _read(layer: nn.Module, recorder: Recorder) -> Parts:
    """Return a layer's parts from the calls of its children."""
    learned = [
        seen
        for seen in recorder.seen
        if not is_norm(seen.part) and next(seen.part.parameters(), None) is not None
    ]
    found = [seen for seen in learned if seen.given.shape == seen.returned.shape]
    mixers, mlps = found[:1], found[1:]
    if len(found) > 2:
        mixing = [_mixes(seen) for seen in found]
        mixers = list(compress(found, mixing))
        mlps = list(compress(found, map(not_, mixing)))
    if not mixers:
        names = ", ".join(seen.name for seen in found) or "none"
        raise ValueError(
            f"layer={type(layer).__name__}: its parts from [b t d] to [b t d] are {names}; one of "
            "them must move information between positions"
        )
    mixer, mlp = mixers[0], mlps[0] if mlps else None
    before = recorder.find_source(mixer.given)
    between = None if mlp is None else recorder.find_source(mlp.given)
    stream = mixer.given if before is None else before.given
    middle = False
    if mlp is not None and before is not None and between is not None:
        middle = between.part is not before.part and not is_same(between.given, stream)
    elif mlp is not None and before is None and between is None:
        # As in OLMo 2, which norms what both return.
        middle = not (is_same(mlp.given, stream) or is_same(mlp.given, mixer.returned))
    return Parts(
        layer,
        mixers,
        None if before is None else before.part,
        mlps,
        None if between is None else between.part,
        middle,
        len(learned) == 1,
    )


@torch.no_grad()
def _mixes(seen: Seen) -> bool:
    """Whether what a part returns at later positions depends on what it reads at the first one."""
    changed = seen.given.clone()
    changed[:, 0] += 1 + changed[:, 0].square()
    returned = seen.part(changed, *seen.call.args, **seen.call.kwargs)
    first = returned[0] if isinstance(returned, tuple) else returned
    return not is_close(first[:, 1:], seen.returned[:, 1:])


def is_norm(part: nn.Module) -> bool:
    """Whether a part is a norm, by the name of its class."""
    return "norm" in type(part).__name__.lower()


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in memory, in whatever shape."""
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()
