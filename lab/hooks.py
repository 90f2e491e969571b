"""Named points inside a model whose tensors can be read or replaced, as in TransformerLens."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Protocol, cast, runtime_checkable

from torch import Tensor, nn

from lab.compilation import keep_eager
from tasks.near_names import find_near


@runtime_checkable
class KeywordHook(Protocol):
    """A hook that takes its point by keyword, as in TransformerLens."""

    def __call__(self, tensor: Tensor, /, *, hook: "HookPoint") -> Tensor | None:
        """Return the tensor's replacement, or None to keep it."""
        ...


PositionalHook = Callable[[Tensor, "HookPoint"], Tensor | None]
HookFn = PositionalHook | KeywordHook
"""A function of a tensor and its point; what it returns, unless None, replaces the tensor.

The point is passed as `hook=` to a function that has a parameter of this name.
"""

NamesFilter = str | list[str] | Callable[[str], bool] | None
"""Which points to keep: one name, several, a predicate, or None for all."""


class HookPoint(nn.Module):
    """An identity module that gives a tensor a name.

    Layers compute what only hooks need (such as an attention pattern) only where `active` is
    true; without hooks the point costs one call.
    """

    def __init__(self):
        super().__init__()
        self.name = ""
        # torch.compile recompiles when an attribute that it has read changes. It reads this one;
        # torch's own hooks it would miss when they are added later, and keep when removed.
        self.hooked = False
        self._fns: dict[tuple[bool, int], PositionalHook] = {}
        self._added = 0

    def layer(self) -> int:
        """Return the block of the point.

        Raises:
            ValueError: for a point outside the blocks.
        """
        parts = self.name.split(".")
        if parts[0] != "blocks" or len(parts) < 2:
            raise ValueError(f"{self.name}: is not a point of a block")
        return int(parts[1])

    @property
    def active(self) -> bool:
        """Whether a hook is attached."""
        return self.hooked or bool(self._forward_hooks)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, or what the hooks replace it with."""
        return self._apply_hooks(x) if self.hooked else x

    def add_hook(self, fn: HookFn, *, last: bool = False) -> Callable[[], None]:
        """Attach a hook, and return a function that removes it.

        Args:
            fn: receives the result of the hooks before it.
            last: run after hooks that are attached later too, to see the final tensor.
        """
        # Keys are never reused: a removed hook may be removed once more.
        self._added += 1
        key = last, self._added
        self._fns[key] = _adapt_hook(fn)
        self.hooked = True

        def remove() -> None:
            self._fns.pop(key, None)
            self.hooked = bool(self._fns)

        return remove

    def remove_hooks(self) -> None:
        """Remove all hooks."""
        self._fns.clear()
        self.hooked = False

    @keep_eager
    def _apply_hooks(self, x: Tensor) -> Tensor:
        for _, fn in sorted(self._fns.items(), key=lambda item: item[0]):
            replaced = fn(x, self)
            x = x if replaced is None else replaced
        return x


def _adapt_hook(fn: HookFn) -> PositionalHook:
    """Return a hook that is called as fn(tensor, point)."""
    try:
        by_keyword = "hook" in signature(fn).parameters
    except (TypeError, ValueError):  # a function written in C without a signature
        by_keyword = False
    if not by_keyword:
        return cast(PositionalHook, fn)
    named = cast(KeywordHook, fn)
    return lambda tensor, point: named(tensor, hook=point)


def hook_points(model: nn.Module) -> dict[str, HookPoint]:
    """Return the model's points by dotted name, without the wrappers of torch.compile."""
    points = {
        n.replace(f"{_SHELL}.", ""): m for n, m in model.named_modules() if isinstance(m, HookPoint)
    }
    for name, point in points.items():
        point.name = name
    return points


_THEIRS = {"attn": "mixer", "ln1": "norm_mixer", "ln2": "norm_mlp", "ln_final": "norm_final"}
"""TransformerLens's names of a model's parts, and ours."""
_OURS = {ours: theirs for theirs, ours in _THEIRS.items()}


def to_own_name(name: str) -> str:
    """Return the lab's name of a point that TransformerLens names.

    >>> to_own_name("blocks.0.attn.hook_pattern")
    'blocks.0.mixer.hook_pattern'
    """
    return ".".join(_THEIRS.get(part, part) for part in name.split("."))


def to_their_name(name: str) -> str:
    """Return TransformerLens's name of a point that the lab names.

    >>> to_their_name("blocks.0.mixer.hook_pattern")
    'blocks.0.attn.hook_pattern'
    """
    return ".".join(_OURS.get(part, part) for part in name.split("."))


_SHELL = "_orig_mod"
"""The attribute of a compiled module that holds the original one."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return the original of a compiled module, or the module itself."""
    inner = getattr(model, _SHELL, model)
    assert isinstance(inner, nn.Module)
    return inner


def is_watched(model: nn.Module) -> bool:
    """Whether any hook is attached to a model: one of ours, or one of torch's to a module."""
    return any(
        (isinstance(module, HookPoint) and module.hooked)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in model.modules()
    )


def find_points(model: nn.Module, names_filter: NamesFilter) -> dict[str, HookPoint]:
    """Return the points that a filter selects; it may go by TransformerLens's names, too.

    Raises:
        ValueError: when a name or a predicate matches no point; similar names are listed.
    """
    points = hook_points(model)
    if names_filter is None:
        return points
    if callable(names_filter):
        chosen = {
            n: p for n, p in points.items() if names_filter(n) or names_filter(to_their_name(n))
        }
        if not chosen:
            raise ValueError(f"names_filter matches none of the model's {len(points)} hook points")
        return chosen
    wanted = [names_filter] if isinstance(names_filter, str) else names_filter
    wanted = [name if name in points else to_own_name(name) for name in wanted]
    for name in wanted:
        if name not in points:
            near = find_near(name, points) or list(points)[:3]
            raise ValueError(f"no hook point {name!r}; near names: {', '.join(near)}")
    return {name: points[name] for name in wanted}


@contextmanager
def hooks(model: nn.Module, fwd_hooks: list[tuple[NamesFilter, HookFn]]) -> Iterator[nn.Module]:
    """Attach hooks inside a `with` block; an exception removes them too.

    They also act in compiled code, which is recompiled with a graph break at each point that has
    a hook, so torch.compile(fullgraph=True) raises.

    Args:
        model: any module with hook points, compiled or not; its original is yielded.
        fwd_hooks: pairs of (name, names or predicate; function of tensor and point).

    Raises:
        ValueError: for a name that matches no point.
    """
    model = unwrap(model)
    with ExitStack() as stack:
        for names_filter, fn in fwd_hooks:
            for point in find_points(model, names_filter).values():
                stack.callback(point.add_hook(fn))
        yield model


def run_with_hooks(
    model: nn.Module, tokens: Tensor, fwd_hooks: list[tuple[NamesFilter, HookFn]]
) -> Tensor:
    """Run the model once with hooks, and return its logits [b t v].

    Raises:
        ValueError: for a name that matches no point.
    """
    with hooks(model, fwd_hooks) as model:
        return model(tokens)


class _StopError(Exception):
    """Carries the residual stream out of a forward pass that stops early."""

    def __init__(self, residual: Tensor):
        self.residual = residual


def run_with_cache(
    model: nn.Module,
    tokens: Tensor,
    names_filter: NamesFilter = None,
    stop_at_layer: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the model once and keep the tensors at its hook points, without their graphs.

    A hook of your own sees tensors with their graphs.

    >>> import torch
    >>> from lab.models import build
    >>> model = build("AM*2", vocab_size=64, d_model=16, n_heads=2)
    >>> tokens = torch.tensor([[1, 2, 3, 4, 5]])
    >>> logits, cache = run_with_cache(model, tokens, "blocks.1.mixer.hook_pattern")
    >>> cache["blocks.1.mixer.hook_pattern"].shape
    torch.Size([1, 2, 5, 5])

    Args:
        model: a language model of this lab.
        tokens: int64 [b t].
        names_filter: which points to keep; None keeps all, including quadratic ones.
        stop_at_layer: stop before this block and return its residual stream [b t d] in place
            of the logits [b t v]; negative ones count from the end.

    Raises:
        ValueError: for a name that matches no point, or a layer that does not exist.
    """
    model = unwrap(model)
    cache: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        cache[point.name] = tensor.detach()

    def stop(tensor: Tensor, point: HookPoint) -> None:
        raise _StopError(tensor)

    fwd_hooks: list[tuple[NamesFilter, HookFn]] = [(names_filter, keep)]
    if stop_at_layer is not None:
        points = hook_points(model)
        blocks = {n.split(".")[1] for n in points if n.startswith("blocks.")}
        layer = stop_at_layer + (len(blocks) if stop_at_layer < 0 else 0)
        first = f"blocks.{layer}.hook_resid_pre"
        if first not in points:
            raise ValueError(f"stop_at_layer={stop_at_layer}: the model has no such block")
        fwd_hooks.append((first, stop))
    with hooks(model, fwd_hooks):
        try:
            return model(tokens), cache
        except _StopError as stopped:
            return stopped.residual, cache
