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
        "a comment's second line without its hash": catch_refusal(
            SyntaxError, lambda: compile(PROSE, SOURCE, "exec")
        ),
        "the body of __init__ not indented": catch_refusal(
            IndentationError, lambda: compile(BODY_BESIDE_ITS_HEAD, SOURCE, "exec")
        ),
        "'bt(hp)->bthp'": catch_refusal(EinopsError, lambda: rearrange(x, "bt(hp)->bthp", h=2)),
        "'...->...1'": catch_refusal(EinopsError, lambda: rearrange(x, "...->...1")),
        "a function without return": catch_refusal(
            RuntimeError, lambda: rearrange((lambda x: None)(x), "b t h p -> b t (h p)")
        ),
        "a missing submodule": catch_refusal(AttributeError, lambda: nn.Module().BC_rotary_emb),
        "undefined names": catch_refusal(NameError, lambda: eval(NAMES, {})),
        "a length that is not padded": catch_refusal(
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
        printed="Two listings do not parse (line 7 of the helper, line 3 of the class). They have "
        "einops patterns without spaces, a function without return, undefined names, and a padded "
        "tensor that is not used.",
        meant="lab.ops.ssd.ssd",
        printed_evidence="; ".join(f"{what}: {r or 'runs'}" for what, r in refusals.items()),
        meant_evidence=f"on 10 tokens in chunks of 4 it is off the recurrence in fp64 by "
        f"{error:.1e}",
        printed_option=None,
        meant_option="the mixer S",
        fails=all(refusals.values()) and spaced,
        holds=error < 1e-12,
        note=f"{MINIATURE} The helper pads only to count the axes, and then splits the unpadded "
        "tensor. So once it parses, it still refuses lengths that are not multiples of the chunk. "
        "The kernel is not imported either, which the listing's bare except would hide. "
        "lst:innerfuncattn and lst:cdmoe also have patterns without spaces.",
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
        printed="The sum is over the chunk that a state goes to (dim = 2).",
        meant="The sum is over the chunk that a state comes from (dim = 3).",
        printed_evidence="in chunks of 4 tokens it is off the recurrence by "
        f"{errors['target', 4]:.1e} at T = 4, and by {errors['target', 12]:.1e} at T = 12, where "
        f"the last token's dt also moves earlier outputs, by {moved['target', 12]:.1e}",
        meant_evidence=f"it is off by {errors['source', 12]:.1e} at T = 12, and earlier outputs "
        f"move by {moved['source', 12]:.1e}",
        printed_option="--model lab.layers.printed:TargetSummedSSD",
        meant_option="the mixer S",
        fails=errors["target", 4] < 1e-12
        and errors["target", 12] > 0.1
        and moved["target", 12] > 1e-3,
        holds=errors["source", 12] < 1e-12 and moved["source", 12] == 0,
        note="As printed, a chunk starts from what the chunk before it wrote, scaled by later "
        "decays.",
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
        meant="repeat_interleave(H // G, 2), or no repetition, as kernels take G groups",
        printed_evidence=f"4 heads read groups {tiled}, which is off the grouped form by "
        f"{apart:.1e}",
        meant_evidence=f"4 heads read groups {interleaved}, which is off it by {same:.1e}",
        printed_option="--option S.groups=tiled --option S.n_groups=2",
        meant_option="--option S.groups=interleaved, the default",
        fails=tiled == [0, 1, 0, 1] and apart > 0.1,
        holds=interleaved == [0, 0, 1, 1] and same < 1e-12,
        note="This is only an order of heads. Training from scratch does not show it; loading the "
        "weights into a kernel does.",
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
        printed="dt = softplus(W x) has no bias, and A = −1 … −H.",
        meant="A bias starts dt in [0.001, 0.1], and A is in [−16, −1], as in Mamba-2.",
        printed_evidence=f"a single head keeps {decay:.2f} of its state per token and "
        f"{decay**32:.1e} after 32. Of 64 heads, the longest half-life is {longest:.2f} tokens and "
        f"the median {median:.3f}",
        meant_evidence=f"of 64 heads, the longest half-life is {meant_longest:.0f} tokens and the "
        f"median {meant_median:.0f}",
        printed_option="--option S.dt_init=paper",
        meant_option="--option S.dt_init=mamba2, the default",
        fails=decay**32 < 1e-9 and longest < 2,
        holds=meant_longest > 100 and meant_median > 2,
        note="The listing's dt_proj has torch's default bias, at most 1/√d, which changes little.",
    )
