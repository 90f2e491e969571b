"""A training step on hard MQAR: the lab's against the usual way, with the same weights and rows.

The usual way is fp32, attention with an explicit softmax over [b h t s], logits at all positions
[b t v], and a cross-entropy that ignores positions that are not scored. A second comparison is the
lab's own step that computes everything, against the one that computes only what is read.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.bench.ratio import Contest, Ratio
from lab.config import TrainConfig
from lab.layers.attention import Attention
from lab.lengthening import Stage
from lab.machine import use_threads
from lab.models import LanguageModel, build
from lab.ops.rope import rotate
from lab.training.loop import differentiate, start
from lab.training.speed import StepTime, list_precisions, list_thread_counts, time_choices
from tasks.base import IGNORE
from tasks.mqar import MQAR

SETTINGS = ((256, 64, 32, 5.0), (2048, 512, 4, 10.0))
"""(seq_len, pairs, rows a step, promised ratio); 8,192 tokens a step in both."""
MEMORY_TARGET = 3.0
VOCAB_SIZE, D_MODEL = 8192, 64
STACKS = ("AM*2", "SM*2", "SE IE")


def measure() -> Iterator[Ratio]:
    """Measure speed and peak memory against the usual step, and what computing less saves."""
    for seq_len, n_pairs, size, target in SETTINGS:
        setting = _choose_setting(seq_len, size)
        ours = partial(_prepare_step, "AM*2", seq_len, size, setting)
        theirs = partial(_prepare_usual_step, seq_len, size)
        name = f"training step, T={seq_len}, K={n_pairs}, {size} rows"
        yield from Contest(name, ours, theirs, target, MEMORY_TARGET, (size, size)).measure()
    for stack in STACKS:
        for seq_len, _, size, _ in SETTINGS:
            setting = StepTime("fp32", torch.get_num_threads(), 0.0)
            ours = partial(_prepare_step, stack, seq_len, size, setting)
            name = f"{stack}, step that computes only what is read, T={seq_len}, {size} rows"
            yield from Contest(name, ours, partial(ours, whole=True)).measure()


def _choose_setting(seq_len: int, size: int) -> StepTime:
    """Return the precision and the threads that a run would choose on this machine."""
    stage, cpu = Stage(MQAR(seq_len=seq_len, vocab_size=VOCAB_SIZE), size, 1), torch.device("cpu")
    choices = [(p, n) for p in list_precisions(cpu) for n in list_thread_counts(cpu)]
    model = build("AM*2", vocab_size=VOCAB_SIZE, d_model=D_MODEL)
    return time_choices(model, [stage], choices)[0]


def _prepare_step(
    stack: str, seq_len: int, size: int, setting: StepTime, whole: bool = False
) -> Callable[[], object]:
    """Return the lab's step; a hook sees everything, so that with one the step is whole."""
    model = build(stack, vocab_size=VOCAB_SIZE, d_model=D_MODEL)
    batch = MQAR(seq_len=seq_len, vocab_size=VOCAB_SIZE).batch(size=size)
    state = start(model, TrainConfig(optimizer="adamw"))
    hooks: Any = [("hook_embed", lambda x, hook: None)] if whole else []

    def take() -> None:
        with use_threads(setting.threads), model.hooks(hooks):
            differentiate(model, batch, setting.precision)
            for optimizer in state.optimizers.values():
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    return take


def _prepare_usual_step(seq_len: int, size: int) -> Callable[[], object]:
    model = build("AM*2", vocab_size=VOCAB_SIZE, d_model=D_MODEL)
    batch = MQAR(seq_len=seq_len, vocab_size=VOCAB_SIZE).batch(size=size)
    optimizer = torch.optim.AdamW(model.parameters())

    def take() -> None:
        logits = compute_usual_logits(model, batch.inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return take


def compute_usual_logits(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return the logits [b t v] of an "AM…" model from its weights, written the usual way."""
    x = model.embed(tokens)
    t = tokens.shape[1]
    positions = torch.arange(t)
    future = torch.ones(t, t, dtype=torch.bool).triu(1)
    for block in model.list_blocks():
        assert block.norm_mixer is not None
        assert block.norm_mlp is not None
        assert block.mlp is not None
        mixer, u = block.mixer, block.norm_mixer(x)
        assert isinstance(mixer, Attention)
        q, k, v = (
            linear(u).unflatten(-1, (mixer.n_heads, -1)) for linear in (mixer.q, mixer.k, mixer.v)
        )
        q, k = rotate(q, positions), rotate(k, positions)
        scores = torch.einsum("bthp,bshp->bhts", q, k) / math.sqrt(q.shape[-1])
        pattern = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + mixer.out(torch.einsum("bhts,bshp->bthp", pattern, v).flatten(2))
        x = x + block.mlp(block.norm_mlp(x))
    return model.head(model.norm_final(x))
