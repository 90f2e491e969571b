"""S: state space duality."""

from typing import get_args

import torch
import torch.nn.functional as F
from einops import EinopsError, rearrange
from torch import Tensor, nn

from lab.errata.erratum import MINIATURE, Erratum, catch_refusal
from lab.errata.probes import build_seeded, draw_normal, measure_gap
from lab.layers.printed.ssd import Summed, ssd_by_chunk_matrix
from lab.layers.ssd import SSD
from lab.ops.ssd import ssd
from lab.ops.ssd_forms import ssd_recurrent

PROSE = "def split(x):\n    # the first line of a remark,\n    and its second, without a hash\n"
BODY_BESIDE_ITS_HEAD = "def f(x):\nreturn x\n"
NAMES = "hidden_states, position_ids"
SOURCE = "in miniature"


def _draw_inputs(t: int, h: int = 2, p: int = 3, g: int = 1, n: int = 4) -> tuple[Tensor, ...]:
    """Return x, dt, A, B, C; heads forget by about a third at each token."""
    x, B, C = (
        draw_normal(2, t, h, p),
        draw_normal(2, t, g, n, seed=1),
        draw_normal(2, t, g, n, seed=2),
    )
    dt = F.softplus(draw_normal(2, t, h, seed=3) - 1)
    return x, dt, -torch.arange(1.0, h + 1).double(), B, C


def s1() -> Erratum:
    """The listings of SSD cannot run."""
    x = torch.ones(2, 6, 8)
    refusals = {
        "a remark's second line without its hash": catch_refusal(
            SyntaxError, lambda: compile(PROSE, SOURCE, "exec")
        ),
        "__init__'s body not indented": catch_refusal(
            IndentationError, lambda: compile(BODY_BESIDE_ITS_HEAD, SOURCE, "exec")
        ),
        "'bt(hp)->bthp'": catch_refusal(EinopsError, lambda: rearrange(x, "bt(hp)->bthp", h=2)),
        "'...->...1'": catch_refusal(EinopsError, lambda: rearrange(x, "...->...1")),
        "no return": catch_refusal(
            RuntimeError, lambda: rearrange((lambda x: None)(x), "b t h p -> b t (h p)")
        ),
        "a submodule never made": catch_refusal(AttributeError, lambda: nn.Module().BC_rotary_emb),
        "names from nowhere": catch_refusal(NameError, lambda: eval(NAMES, {})),
        "padding dropped": catch_refusal(
            EinopsError, lambda: rearrange(x, "b (c l) h -> b c l h", l=4)
        ),
    }
    spaced = rearrange(x, "b t (h p) -> b t h p", h=2).shape == (2, 6, 2, 4)
    y, state = ssd(*_draw_inputs(10), chunk_len=4)
    right, last = ssd_recurrent(*_draw_inputs(10))
    error = max(measure_gap(y, right), measure_gap(state, last))
    return Erratum(
        row="S1",
        where="lst:ssd_helper, lst:ssd_algorithm_pytorch and the listing after it",
        printed="two listings that do not parse (line 7 of the helper, 3 of the class), einops "
        "patterns without spaces, no return, names that nothing defines, a padded tensor dropped",
        meant="lab.ops.ssd.ssd",
        printed_evidence="; ".join(f"{what}: {r or 'runs'}" for what, r in refusals.items()),
        meant_evidence=f"10 tokens in chunks of 4: off the fp64 recurrence by {error:.1e}",
        printed_option=None,
        meant_option="the mixer S",
        fails=all(refusals.values()) and spaced,
        holds=error < 1e-12,
        note=f"{MINIATURE}. The helper pads to look at the number of axes and then splits what "
        "was not padded: once it parses, it still refuses T not a multiple of the chunk. Nor is "
        "the kernel imported, which an except for everything would hide. Patterns without spaces "
        "stand in lst:innerfuncattn and lst:cdmoe too",
    )


def s2() -> Erratum:
    """The sum over chunks runs over the wrong one."""
    chunk, errors, moved = 4, {}, {}
    for summed in get_args(Summed):
        for t in (4, 12):
            x, dt, A, B, C = _draw_inputs(t)

            def run(dt: Tensor, summed: Summed = summed, x=x, A=A, B=B, C=C):
                return ssd_by_chunk_matrix(x, dt, A, B[:, :, 0], C[:, :, 0], chunk, summed)

            y, right = run(dt), ssd_recurrent(x, dt, A, B, C)[0]
            errors[summed, t] = measure_gap(y, right)
            later = dt.clone()
            later[:, -1] += 1
            moved[summed, t] = measure_gap(run(later)[:, :-1], y[:, :-1])
    return Erratum(
        row="S2",
        where="lst:ssd_algorithm_pytorch, the sum over chunks",
        printed="sums over the chunk that a state goes to (dim = 2)",
        meant="sums over the chunk that it comes from (dim = 3)",
        printed_evidence=f"chunks of 4: off by {errors['target', 4]:.1e} at T = 4 and by "
        f"{errors['target', 12]:.1e} at T = 12, where the last token's dt moves earlier outputs by "
        f"{moved['target', 12]:.1e}",
        meant_evidence=f"off by {errors['source', 12]:.1e} at T = 12; earlier outputs move by "
        f"{moved['source', 12]:.1e}",
        printed_option="--model lab.layers.printed:TargetSummedSSD",
        meant_option="the mixer S",
        fails=errors["target", 4] < 1e-12
        and errors["target", 12] > 0.1
        and moved["target", 12] > 1e-3,
        holds=errors["source", 12] < 1e-12 and moved["source", 12] == 0,
        note="a chunk then starts from its neighbour's write alone, scaled by decays after it",
    )


def s3() -> Erratum:
    """Groups tiled, where the kernels interleave them."""
    h, g = 4, 2
    numbers = torch.arange(g)
    tiled = numbers.repeat(h // g).tolist()
    interleaved = numbers.repeat_interleave(h // g).tolist()
    x, dt, A, B, C = _draw_inputs(20, h=h, g=g)
    grouped = ssd(x, dt, A, B, C, chunk_len=8)[0]
    wrong = ssd(x, dt, A, *(z.repeat(1, 1, h // g, 1) for z in (B, C)), chunk_len=8)[0]
    right = ssd(x, dt, A, *(z.repeat_interleave(h // g, 2) for z in (B, C)), chunk_len=8)[0]
    apart, same = measure_gap(wrong, grouped), measure_gap(right, grouped)
    return Erratum(
        row="S3",
        where="the listing after lst:ssd_algorithm_pytorch",
        printed="repeat(1, 1, H // G, 1)",
        meant="repeat_interleave(H // G, 2), or G groups handed on as they are",
        printed_evidence=f"4 heads read groups {tiled}; off the grouped form by {apart:.1e}",
        meant_evidence=f"4 heads read groups {interleaved}; off it by {same:.1e}",
        printed_option="--option S.groups=tiled --option S.n_groups=2",
        meant_option="--option S.groups=interleaved, the default",
        fails=tiled == [0, 1, 0, 1] and apart > 0.1,
        holds=interleaved == [0, 0, 1, 1] and same < 1e-12,
        note="an order of heads: training from scratch does not tell them apart, weights that "
        "meet a kernel do",
    )


def s4() -> Erratum:
    """As printed, SSD forgets by half at each token."""

    def measure_half_lives(dt_init: str) -> tuple[float, float]:
        layer = build_seeded(lambda: SSD(64, 64, d_state=2, dt_init=dt_init))  # type: ignore[arg-type]
        dt = F.softplus(layer.dt_proj(draw_normal(1, 256, 64)))
        assert layer.A_log is not None
        rates = dt.mean((0, 1)) * layer.A_log.exp()
        lives = torch.log(torch.tensor(2.0)) / rates
        return lives.median().item(), lives.max().item()

    # The one head of the recall experiments has A = −1; dt = softplus(0) without an input.
    decay = float(torch.exp(-F.softplus(torch.zeros((), dtype=torch.float64))))
    (median, longest), (meant_median, meant_longest) = (
        measure_half_lives("paper"),
        measure_half_lives("mamba2"),
    )
    return Erratum(
        row="S4",
        where="the listing after lst:ssd_algorithm_pytorch; § Downstream Evaluation, no bias terms",
        printed="dt = softplus(W x) without bias, A = −1 … −H",
        meant="a bias of dt that starts it in [0.001, 0.1], A in [−16, −1] (Mamba-2)",
        printed_evidence=f"one head keeps {decay:.2f} a token, {decay**32:.1e} after 32; of 64 "
        f"heads the longest half-life is {longest:.2f} tokens, the median {median:.3f}",
        meant_evidence=f"of 64 heads the longest half-life is {meant_longest:.0f} tokens, the "
        f"median {meant_median:.0f}",
        printed_option="--option S.dt_init=paper",
        meant_option="--option S.dt_init=mamba2, the default",
        fails=decay**32 < 1e-9 and longest < 2,
        holds=meant_longest > 100 and meant_median > 2,
        note="the listing's own dt_proj has torch's default bias, at most 1/√d: it changes little",
    )
