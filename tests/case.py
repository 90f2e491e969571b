"""What a case of the laws is, and wrappers that turn mixers and models into cases."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from lab.laws import LAWS, Outcome, Reach
from lab.layers.attention import Attention, AttentionState
from lab.layers.mask import reveal_stored
from lab.layers.state import State
from lab.models import ARCHITECTURES
from lab.models.language_model import LanguageModel, ModelState

Kind = Literal["mixer", "transform", "model", "printed", "sequence"]
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class Case:
    """A module from [b t d_model] to the same shape, and how laws turn out on it.

    Attributes:
        name: of the test.
        build: builds the module.
        dead: its parameters that learn nothing, for which "gradient reach" fails.
        verdicts: of laws whose outcome differs from that of its kind (`list_expected`).
        kind: which laws apply; a printed reading returns its matrix but does not decode; a sequence
            mixer does neither.
        d_model: width d.
        lengths: of the probes.
    """

    name: str
    build: Callable[[], nn.Module]
    dead: Mapping[str, Reach] = field(default_factory=dict)
    verdicts: Mapping[str, Outcome] = field(default_factory=dict)
    kind: Kind = "mixer"
    d_model: int = 8
    lengths: tuple[int, ...] = (1, 2, 5, 16)

    def make(self) -> nn.Module:
        """Return the module with the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()


class OracleMasked(nn.Module):
    """An attention with the oracle mask, which keeps every third position and the fifth."""

    relative = False

    def __init__(self, mixer: Attention):
        super().__init__()
        self.mixer = mixer

    def keep(self, x: Tensor) -> Tensor:
        positions = torch.arange(4096, device=x.device)
        return ((positions % 3 == 1) | (positions == 4)).expand(x.shape[0], -1)

    def forward(self, x: Tensor) -> Tensor:
        with reveal_stored(self.mixer, self.keep(x)):
            return self.mixer(x)

    def start(self, batch: int, position: int = 0) -> State:
        return self.mixer.start(batch, position)

    def prefill(
        self, x: Tensor, state: AttentionState | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, State]:
        with reveal_stored(self.mixer, self.keep(x)):
            return self.mixer.prefill(x, state, keep)

    def step(self, x: Tensor, state: AttentionState) -> tuple[Tensor, State]:
        with reveal_stored(self.mixer, self.keep(x)):
            return self.mixer.step(x, state)

    def matrix(self, x: Tensor) -> Tensor:
        with reveal_stored(self.mixer, self.keep(x)):
            return self.mixer.matrix(x)

    def values(self, x: Tensor) -> Tensor:
        return self.mixer.values(x)

    def project(self, x: Tensor, z: Tensor) -> Tensor:
        return self.mixer.project(x, z)


class Embedded(nn.Module):
    """A language model from embedded tokens to the last norm, without its tables."""

    relative = True

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model.requires_grad_()
        for outside in (model.embed, model.head):
            outside.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model.forward_embeddings(x)

    def start(self, batch: int, position: int = 0) -> ModelState:
        return self.model.start(batch, position)

    def prefill(
        self, x: Tensor, state: ModelState | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        return self.model.prefill_embeddings(x, state, keep)

    def step(self, x: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        return self.model.step_embeddings(x, state)


def move(module: Module) -> Module:
    """Add noise to the parameters, so that masks and gates have an effect."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 2)
    return module


def build_architecture(name: str, **sizes: int) -> nn.Module:
    """Build an architecture at its smallest, with every block of its unit."""
    options = {} if name in ("doge", "llama") else {"S.chunk_len": 4}
    return Embedded(
        ARCHITECTURES[name](vocab_size=8, d_model=8, n_heads=2, d_ff=8, options=options, **sizes)
    )


def list_expected(case: Case) -> dict[str, Outcome]:
    """List the outcome of each law on a case, by its kind and its exceptions."""
    outcomes: dict[str, Outcome] = dict.fromkeys(LAWS, "holds")
    # torch.compile cannot trace the tests' type checks; test_numbers compiles in a process.
    outcomes["forms agree"] = "not decided"
    for law in (*NOT_OF_KIND[case.kind], "documents do not mix"):  # none takes them as arguments
        outcomes[law] = "not applicable"
    if case.dead:
        outcomes["gradient reach"] = "fails"  # unless the case's verdicts say otherwise
    return {**outcomes, **case.verdicts}


DECODING = ("prefill = step", "relative", "padding")
NOT_OF_KIND: dict[Kind, tuple[str, ...]] = {
    "mixer": (),
    "transform": (*DECODING, "matrix applies"),
    "model": ("matrix applies",),
    "printed": DECODING,
    "sequence": (*DECODING, "matrix applies"),
}
"""Laws that do not apply to a kind, which has no state or no matrix."""
