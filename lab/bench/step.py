"""A training step on hard MQAR: the lab's against the usual way, with the same weights and rows.

The usual way is fp32, attention with an explicit softmax over [b h t s], logits at all positions
[b t v], and a cross-entropy that ignores positions that are not scored. The lab's step is `fit`'s.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lab.bench.peak import measure_matrix_peak, measure_peak_mib
from lab.bench.products import record_products, time_products
from lab.bench.ratio import Ratio, time_in_turns
from lab.bench.traffic import record_traffic, time_traffic
from lab.config import TrainConfig
from lab.layers.attention import Attention
from lab.lengthening import Stage
from lab.machine import use_threads
from lab.models import LanguageModel, build
from lab.models.evaluation import score
from lab.ops.cross_entropy import linear_cross_entropy
from lab.ops.rope import rotate
from lab.training.loop import start
from lab.training.speed import StepTime, list_precisions, list_thread_counts, time_choices
from tasks.base import IGNORE, Batch
from tasks.mqar import MQAR

SETTINGS = ((256, 64, 32, 5.0), (2048, 512, 4, 10.0))
"""(seq_len, pairs, rows a step, promised ratio); 8,192 tokens a step in both."""
MEMORY_TARGET = 3.0
PRODUCTS_TARGET = 0.6
"""Promised share of the step's time that its matrix products take alone."""
VOCAB_SIZE, D_MODEL = 8192, 64


def measure() -> list[Ratio]:
    """Measure speed, peak memory, and the share of the matrix-product peak reached."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    ratios = []
    for seq_len, n_pairs, size, target in SETTINGS:
        where = f"training step, T={seq_len}, K={n_pairs}, {size} rows"
        setting = _choose_setting(seq_len, size)
        ours, theirs = _lab_step(seq_len, size, setting)(), _usual_step(seq_len, size)()
        ours_s, theirs_s = time_in_turns(ours, theirs)
        ratios.append(
            Ratio(where, size / ours_s, size / theirs_s, "rows/s", theirs_s / ours_s, target)
        )
        our_peak = measure_peak_mib(_lab_step(seq_len, size, setting))
        their_peak = measure_peak_mib(_usual_step(seq_len, size))
        name = f"{where}: peak memory"
        ratios.append(Ratio.of_costs(name, our_peak, their_peak, "MiB", MEMORY_TARGET))
        with FlopCounterMode(display=False) as counter:
            ours()
        reached = counter.get_total_flops() / ours_s
        peak = max(measure_matrix_peak(t) for t in (torch.float32, torch.bfloat16))
        ratios.append(
            Ratio(
                f"{where}: share of the matrix-product peak",
                reached / 1e9,
                peak / 1e9,
                "GFLOP/s",
                reached / peak,
                None,
                f"time: {_describe_times(ours)}",
            )
        )
        with use_threads(setting.threads):
            alone = time_products(record_products(ours))
            copies = time_traffic(record_traffic(ours))
        name = f"{where}: against its matrix products alone"
        ratios.append(Ratio.of_costs(name, 1e3 * ours_s, 1e3 * alone, "ms", PRODUCTS_TARGET))
        name = f"{where}: against its products, and copies of what all else reads and writes"
        share = f"products are {alone / (alone + copies):.2f} of these"
        ratios.append(Ratio.of_costs(name, 1e3 * ours_s, 1e3 * (alone + copies), "ms", None, share))
    return ratios


def _make_batch(seq_len: int, size: int) -> Batch:
    return MQAR(seq_len=seq_len, vocab_size=VOCAB_SIZE).batch(size=size)


def _build_model() -> LanguageModel:
    return build("AM*2", vocab_size=VOCAB_SIZE, d_model=D_MODEL)


def _choose_setting(seq_len: int, size: int) -> StepTime:
    """Return the precision and the threads that a run would choose on this machine."""
    stage, cpu = Stage(MQAR(seq_len=seq_len, vocab_size=VOCAB_SIZE), size, 1), torch.device("cpu")
    choices = [(p, n) for p in list_precisions(cpu) for n in list_thread_counts(cpu)]
    return time_choices(_build_model(), [stage], choices)[0]


def _lab_step(seq_len: int, size: int, setting: StepTime) -> Callable[[], Callable[[], float]]:
    return partial(_prepare_lab_step, seq_len, size, setting)


def _usual_step(seq_len: int, size: int) -> Callable[[], Callable[[], float]]:
    return partial(_prepare_usual_step, seq_len, size)


def _prepare_lab_step(seq_len: int, size: int, setting: StepTime) -> Callable[[], float]:
    model, batch = _build_model(), _make_batch(seq_len, size)
    state = start(model, TrainConfig(optimizer="adamw"))

    def take() -> float:
        with use_threads(setting.threads):
            return take_step()

    def take_step() -> float:
        loss, _ = linear_cross_entropy(*score(model, batch, setting.precision))
        loss.backward()
        for optimizer in state.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return take


def _prepare_usual_step(seq_len: int, size: int) -> Callable[[], float]:
    model, batch = _build_model(), _make_batch(seq_len, size)
    optimizer = torch.optim.AdamW(model.parameters())

    def take() -> float:
        logits = compute_usual_logits(model, batch.inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

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


def _describe_times(call: Callable[[], object]) -> str:
    """Describe the time of a call by kind of operation, the largest first."""
    kinds = {
        "matrix products": ("mm", "addmm", "bmm", "linear"),
        "attention": ("attention",),
        "optimizer": ("adam",),
        "softmax": ("softmax", "amax", "scatter"),
        "embedding": ("embedding", "index"),
    }
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    spent: dict[str, float] = {}
    for event in profiled.key_averages():
        kind = next(
            (kind for kind, words in kinds.items() if any(word in event.key for word in words)),
            "elementwise and the rest",
        )
        spent[kind] = spent.get(kind, 0.0) + event.self_cpu_time_total
    total = sum(spent.values())
    shares = sorted(spent.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {100 * value / total:.0f} %" for kind, value in shares)
