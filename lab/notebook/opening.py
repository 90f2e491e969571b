"""`lab.open`: a run folder, or a model of another library."""

import warnings
from pathlib import Path
from typing import overload

from torch import nn

from lab.foreign import KINDS, OpenedModel, open_model
from lab.notebook.trained_run import TrainedRun
from lab.training.run import Run


@overload
def open(what: Path | str, *, trust: bool = False) -> TrainedRun: ...
@overload
def open(what: str, model: nn.Module) -> OpenedModel: ...
def open(
    what: Path | str, model: nn.Module | None = None, *, trust: bool = False
) -> TrainedRun | OpenedModel:
    """Open a run folder, or a causal language model of another library.

    `lab.open("runs/mqar")` is the run that `lab.train` returned, or that the command trained.
    `lab.open("hf", model)` has what a model of the lab has: hook points, matrices, decoding.

    >>> import lab
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2,
    ...                      intermediate_size=32, num_attention_heads=2)
    >>> model = lab.open("hf", AutoModelForCausalLM.from_config(config).eval())
    >>> model
    OpenedModel of LlamaForCausalLM: 2 blocks, d_model 16, a vocabulary of 64
      blocks 0 to 1: LlamaAttention with a matrix, LlamaMLP

    Args:
        what: a run folder; or, before a model, the kind of the model: "hf" or "fla".
        model: a model of this kind (see `lab.foreign.open_model`).
        trust: import the code and read the text that a run names, although no command of yours is
            known to have named them.

    Raises:
        RunError: for a folder that holds no run.
        ValueError: for an unknown kind, or a model that cannot be opened.
        MissingPeerError: where the model's library is not installed.
    """
    if isinstance(what, nn.Module):
        raise ValueError(f'model={type(what).__name__}: give its kind first: lab.open("hf", model)')
    if model is not None:
        return open_model(str(what), model)
    if what in KINDS:
        raise ValueError(f'model=None: must be given after "{what}": lab.open("{what}", model)')
    run = Run.open(what, trust=trust)
    change = run.describe_change()
    if change:
        warnings.warn(f"{what}: {change}; its weights are now used in other code", stacklevel=2)
    return TrainedRun(run)
