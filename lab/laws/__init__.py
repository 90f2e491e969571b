"""What every causal model must obey, as functions that return a verdict.

Each law tries a module from [b t d] to [b t d] on probes and compares outputs that must agree.
"Agree" is measured against the module's own noise floor, in fp64 where the module can run so:
a module whose output moves by n when its input is rounded cannot be held to less than n.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lab.laws.batch import batch_invariant
from lab.laws.causal import causal
from lab.laws.decoding import prefill_equals_step, relative_positions
from lab.laws.forms import forms_agree
from lab.laws.gradient import Reach as Reach
from lab.laws.gradient import gradient_reach
from lab.laws.gradient import reach as reach
from lab.laws.matrix import MatrixMixer as MatrixMixer
from lab.laws.matrix import matrix_applies
from lab.laws.padding import padding
from lab.laws.precision import precision
from lab.laws.probes import Probes as Probes
from lab.laws.probes import draw
from lab.laws.probes import in_double as in_double
from lab.laws.probes import noise_floor as noise_floor
from lab.laws.repeatable import deterministic
from lab.laws.stable import stable
from lab.laws.tables import table_reach
from lab.laws.verdict import Law
from lab.laws.verdict import Outcome as Outcome
from lab.laws.verdict import Verdict as Verdict

LAWS: dict[str, Law] = {
    "deterministic": deterministic,
    "causal": causal,
    "batch-invariant": batch_invariant,
    "prefill = step": prefill_equals_step,
    "relative": relative_positions,
    "padding": padding,
    "gradient reach": gradient_reach,
    "table reach": table_reach,
    "forms agree": forms_agree,
    "matrix applies": matrix_applies,
    "precision": precision,
    "stable": stable,
}
"""Every law by the name that its verdicts carry."""


def certify(
    module: nn.Module | Callable[[Tensor], Tensor],
    d_model: int,
    lengths: Sequence[int] = (1, 2, 5, 16),
    batch: int = 3,
    seed: int = 0,
    *,
    max_len: int = 65_536,
    rounding_len: int = 1024,
    seconds: float = 5.0,
    compiler: str | None = None,
) -> list[Verdict]:
    """Try every law on a module or function, in its mode (train or eval) and on its device.

    Args:
        module: from [b t d] to [b t d], or to another width; a copy is tried, so it comes out as it
            went in. A function has no parameters, and laws of parameters do not apply to it. Tokens
            are not tried: of a language model, certify what follows its embedding.
        d_model: width d.
        lengths: sequence lengths to try; let them span a chunked module's chunks.
        batch: rows b of a probe.
        seed: of the probes.
        max_len: tokens after which "stable" is content.
        rounding_len: tokens among which "precision" counts roundings.
        seconds: what "stable" and "table reach" may take each, above 0.
        compiler: torch.compile's backend for "forms agree", "inductor" or "aot_eager"; compiling
            takes seconds, so None leaves that law undecided.

    Raises:
        ValueError: for no length; for lengths, d_model, batch, max_len or rounding_len below one;
            for no seconds; for a module that refuses the first probe, or does not return [b t …].
    """
    if not lengths or min(*lengths, d_model, batch, max_len, rounding_len) < 1:
        raise ValueError(
            f"{lengths=}, {d_model=}, {batch=}, {max_len=} and {rounding_len=} must be at least 1"
        )
    if not seconds > 0:
        raise ValueError(f"{seconds=} must be above 0")
    if not isinstance(module, nn.Module):
        module = _Applied(module)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    inputs = [draw((batch, length, d_model), seed).to(device) for length in sorted(lengths)]
    module, inputs = _tried(module, inputs)
    probes = Probes(inputs, max_len, rounding_len, seconds, compiler)
    return [law(module, probes) for law in LAWS.values()]


class _Applied(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _tried(module: nn.Module, inputs: list[Tensor]) -> tuple[nn.Module, list[Tensor]]:
    """Return the module and the inputs that laws try, once the first has gone through."""
    name = type(module.function if isinstance(module, _Applied) else module).__name__
    asked = f"{name} must map [b t d] to [b t d]: given {list(inputs[0].shape)} of floats, it"
    try:
        module, inputs = in_double(module, inputs)
        with torch.no_grad():
            y = module(inputs[0])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{asked} raised {type(error).__name__}: {error}") from error
    if not isinstance(y, Tensor):
        raise ValueError(f"{asked} returned {type(y).__name__}")
    if y.ndim != 3 or y.shape[:2] != inputs[0].shape[:2]:
        raise ValueError(f"{asked} returned {list(y.shape)}")
    return module, inputs
