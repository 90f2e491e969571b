"""The user's own mixers: load them by path, check their outputs, report their errors."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lab.files import describe_error
from lab.layers.mixer import take_positions
from lab.models.language_model import LanguageModel
from lab.user_modules import import_object

ROUNDING = 0.02
"""Share of the largest output by which rounding may move an output, also in bf16."""

USER_MIXER = "U"
"""The letter of a mixer class that is not the lab's own."""


def is_from_lab(mixer: nn.Module) -> bool:
    """Whether a mixer's class is the lab's own, whose promises the laws have tested.

    A user's class that inherits from one of the lab's is not: it may change anything. Nor is what
    calls another library's layer.
    """
    return type(mixer).__module__.startswith("lab.layers.")


@contextmanager
def check_mixers(model: LanguageModel) -> Iterator[None]:
    """Check inside a `with` block that every mixer maps [b t d] to [b t d].

    Raises:
        ValueError: when a mixer returns anything else, which broadcasting could hide, or when the
            user's own mixer raises or offers outputs at some positions that are not the same.
    """

    def check(module: Any, args: tuple[Tensor, ...], output: object) -> None:
        given = tuple(args[0].shape)
        if not isinstance(output, Tensor) or output.shape != given:
            got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"{type(module).__name__}.forward: must map [b t d] to [b t d]; "
                f"given {list(given)} it returned {got}"
            )
        if module.takes_positions and not is_from_lab(module):
            _check_positions(module, args[0])

    with ExitStack() as stack:
        for block in model.list_blocks():
            if block.mixer is not None:
                stack.callback(block.mixer.register_forward_hook(check).remove)
        stack.enter_context(_convert_errors_of_mixers(model))
        yield


@contextmanager
def _convert_errors_of_mixers(model: LanguageModel) -> Iterator[None]:
    """Let whatever the user's own mixers raise inside a `with` block be a ValueError."""
    with ExitStack() as stack:
        for block in model.list_blocks():
            mixer = block.mixer
            if mixer is not None and not is_from_lab(mixer):
                stack.callback(setattr, mixer, "forward", mixer.forward)
                mixer.forward = convert_errors(mixer.forward, type(mixer))
        yield


@torch.no_grad()
def _check_positions(mixer: nn.Module, x: Float[Tensor, "b t d"]) -> None:
    """Check that a mixer's outputs at some positions are those of the whole, without dropout.

    Raises:
        ValueError: when they differ by more than rounding explains, or have another shape.
    """
    at = torch.arange(0, (x.shape[1] + 1) // 2, 2, device=x.device).expand(len(x), -1)
    training = mixer.training
    mixer.eval()
    whole = take_positions(mixer.forward(x), at)
    part = mixer.forward(x[:, : int(at.max()) + 1], at=at)
    mixer.train(training)
    name = f"{type(mixer).__name__}.forward"
    if part.shape != whole.shape:
        raise ValueError(
            f"{name}: at={list(at.shape)} must give {list(whole.shape)}, gave {list(part.shape)}"
        )
    off = (part - whole).abs().max().item()
    if not off <= ROUNDING * whole.abs().max().item():
        raise ValueError(
            f"{name}: outputs with `at` differ by up to {off:.2g} from those without; "
            "they must be the same, and causal"
        )


def convert_errors(call: Callable[..., Any], cls: type) -> Callable[..., Any]:
    """Wrap a call of the user's code: whatever it raises becomes a ValueError."""

    def answer(*args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except (Exception, SystemExit) as error:
            where = f"{cls.__module__}:{cls.__name__}"
            raise ValueError(f"model={where}: raised {describe_error(error)}") from error

    return answer


def load_class(path: str) -> type[nn.Module]:
    """Import the class named "module:Class".

    Raises:
        ValueError: when the path has another form, does not import, or names no nn.Module class.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name) or module.startswith("."):
        raise ValueError(
            f"model={path}: must look like package.module:Class; the lab's own are --stack"
        )
    try:
        cls = import_object(module, name)
    # A user's module may raise anything while it is imported.
    except (Exception, SystemExit) as error:
        raise ValueError(f"model={path}: {describe_error(error)}") from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"model={path}: {name} must be a subclass of torch.nn.Module")
    return RECURRENT.get(cls, cls)


class _Recurrent(nn.Module):
    """One of torch's recurrent layers as a mixer: as wide as its input, and read row by row."""

    def __init__(
        self, d_model: int, *, num_layers: int = 1, bias: bool = True, dropout: float = 0.0
    ):
        begin: Any = super().__init__  # of the layer that it is mixed with
        begin(d_model, d_model, num_layers, bias=bias, dropout=dropout, batch_first=True)


RECURRENT: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(kind.__name__, (_Recurrent, kind), {}) for kind in (nn.RNN, nn.GRU, nn.LSTM)
}
"""torch's recurrent layers, which are given two widths, by the mixer that each is."""
