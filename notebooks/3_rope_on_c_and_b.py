# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # RoPE on C and B
#
# Rotary positions were made for queries and keys: do they do for the C and B of SSD what they do
# for attention, and what comes of it?

# %% [markdown]
# ## Only the distance counts
#
# A rotation turns the vector at position j by angles that grow with j. We draw a C and a B for each
# of 64 positions, and ask three things of the inner products $C_i·B_j$. Do they stay when all
# positions shift? Do they, for one C and one B put everywhere, hang on i − j alone? And do they
# change with i − j at all?

# %%
import plotly.graph_objects as go
import torch

import lab
from analysis import frequencies, matrices
from analysis.base import Subject
from analysis.run import curves
from lab.hooks import run_with_cache
from lab.layers.ssd import SSD
from lab.models import build
from lab.ops.rope import rotary_table, rotate
from tasks import TASKS
from tasks.base import IGNORE, Batch

seq_len, d_state = 64, 32
positions = torch.arange(seq_len)
torch.manual_seed(0)
C, B = torch.randn(2, 1, seq_len, 1, d_state, dtype=torch.float64)  # each [b t g n]


def products(C, B, positions):
    """Return all inner products [t s] of C and B, turned to their positions."""
    C, B = rotate(C, positions), rotate(B, positions)
    return torch.einsum("tn,sn->ts", C[0, :, 0], B[0, :, 0])


shifts = {
    s: (products(C, B, positions + s) - products(C, B, positions)).abs().max().item()
    for s in (1, 17, 1000)
}
for s, gap in shifts.items():
    print(f"all positions {s:4} later: products change by {gap:.0e}")

alike = products(C[:, :1].expand_as(C), B[:, :1].expand_as(B), positions)
by_lag = [alike.diagonal(-lag) for lag in range(seq_len)]
spread = max(products.max() - products.min() for products in by_lag).item()
means = torch.stack([products.mean() for products in by_lag])
print(f"one C, one B everywhere: {spread:.0e} between pairs of one lag, ", end="")
print(f"{means.max() - means.min():.1f} between lags")

# %% [markdown]
# ## The recurrence survives
#
# Attention keeps its keys and may turn them whenever it likes; SSD has added its B to a state long
# before it knows who will read. Yet turning C and B is the same as a state that turns by itself.
# Make one complex number of each pair of channels; then the recurrence
# $h_t = e^{a_t - i\theta} h_{t-1} + dt_t\, b_t x_t$, whose b and c are never rotated, gives the
# same $y_t = \mathrm{Re}(\bar c_t h_t)$.

# %%
layer = SSD(16, d_state=d_state, skip=False).double()
x = torch.randn(1, seq_len, 16, dtype=torch.float64)
with torch.no_grad():
    values = layer.values(x)[0, 0]  # [t p]
    _, seen = run_with_cache(layer, x)
dt, a = seen["hook_dt"][0, :, 0], seen["hook_log_decay"][0, :, 0]
cos, sin = rotary_table(torch.ones(1, dtype=torch.long), d_state, dtype=torch.float64)
turn = torch.complex(cos, -sin)[0]  # e^(−iθ) of each pair
b, c = (torch.complex(*seen[f"hook_{name}_pre"][0, :, 0].chunk(2, dim=-1)) for name in ("B", "C"))

state, read = torch.zeros(16, d_state // 2, dtype=torch.complex128), []
for t in range(seq_len):
    state = a[t].exp() * turn * state + dt[t] * values[t, :, None] * b[t]
    read.append((state * c[t].conj()).real.sum(-1))
recurrence = (torch.stack(read) - seen["hook_ssm_out"][0, :, 0]).abs().max().item()
print(f"the turning state is off the layer by {recurrence:.0e}")

# %% [markdown]
# ## SSD's matrix, with and without
#
# Two models of one SSD layer with the same random weights, one with `rope`, one with `decay`, where
# nothing but fading tells near from far. The row is one token, over and over, so that whatever
# differs between entries comes from their places: a smooth fade without rotation, and with it
# stripes along the diagonals, of either sign.

# %%
task = TASKS["mqar"](seq_len=32, n_pairs=8, vocab_size=64)
same = torch.ones(1, 32, dtype=torch.long)
row = Batch(inputs=same, targets=IGNORE * same, roles=0 * same, links={})
pictures = {}
for position in ("decay", "rope"):
    options = {"S.d_state": d_state, "S.position": position, "S.skip": False}
    model = build("SN", vocab_size=64, d_model=32, options=options, seed=0).eval()
    (pictures[position],) = matrices.measure(Subject(task, model, row))
print(pictures["decay"].says)
pictures["decay"].figure()

# %%
print(pictures["rope"].says)
pictures["rope"].figure()

# %% [markdown]
# ## Which frequencies are used
#
# A rotation has fast and slow pairs of channels. Fast ones tell positions apart; those that hardly
# turn within a row are free to carry content. We train one small model with attention below and SSD
# above, and look at C/B and Q/K in one figure: where lies the energy?

# %%
small = TASKS["mqar"](seq_len=16, n_pairs=4, vocab_size=32)
options = {"S.d_state": 32, "S.skip": False}
out = "runs/notebooks/hybrid"
hybrid = lab.train(small, stack="AM SM", d_model=32, options=options, steps=600, out=out)
print(f"accuracy {hybrid.accuracy:.2f}, chance {small.chance:.2f}")
energies, uses, lags, by_pair, bands = frequencies.measure(hybrid.subject)
print(energies.says)
energies.figure()

# %% [markdown]
# Energy is what a frequency could do. Of those edges that recall needs, how much of the score does
# it bring, compared with other edges of the same lag?

# %%
print(uses.says)
uses.figure()

# %% [markdown]
# By lag: the mean score of all pairs, and of the edges that recall needs. C/B has what attention
# has not: a decay on top, here a slow one.

# %%
print(lags.says)
lags.figure()

# %% [markdown]
# The same, pair by pair: which frequencies make the score stand out at which lag.

# %%
print(by_pair.says)
by_pair.figure()

# %% [markdown]
# And the test of it all, with random sets of as many channels as placebo: what does the accuracy
# lose without the fast, the middle, the slow third?

# %%
print(bands.says)
bands.figure()

# %% [markdown]
# ## Other ways to tell positions
#
# SSD has three readings to choose from: `rope` on C and B, `conv`, Mamba-2's short convolution, and
# `decay` alone. The paper compares them by perplexity; here is a first look on recall, one seed and
# few steps each, with two SSD layers and no attention. It is no ranking.

# %%
runs = {}
drawn = go.Figure(layout={"template": "plotly_white", "width": 600, "height": 380})
for position, symbol in (("rope", "circle"), ("conv", "square"), ("decay", "diamond")):
    options = {"S.d_state": 32, "S.position": position}
    out = f"runs/notebooks/ssd-{position}"
    runs[position] = lab.train(
        small, stack="SM*2", d_model=32, options=options, steps=250, lengthen=False, out=out
    )
    _, right = curves.measure(runs[position].subject)
    drawn.add_scatter(x=right.held_out_steps, y=right.held_out, name=position, marker_symbol=symbol)
drawn.add_hline(small.chance, line={"width": 1, "dash": "dot"}, annotation_text="chance")
drawn.update_xaxes(title_text="training step")
drawn.update_yaxes(title_text="held-out accuracy", tickformat=".0%", rangemode="tozero")

# %% [markdown]
# The numbers that the answer rests on:

# %%
print(f"shifted by 1000: {shifts[1000]:.0e}; within a lag: {spread:.0e}")
print(f"turning state against the layer: {recurrence:.0e}")
for use in uses.layers:
    effect, long = use.effect[use.best], use.long[use.best]
    print(f"layer {use.layer} {use.sides}, {use.edge}: {effect:+.2f} standard deviations, ", end="")
    print(f"{long:.0%} of it by wavelengths longer than the row")
for position, run in runs.items():
    print(f"{position:5} {run.accuracy:.2f} after {run.result['steps']} steps")

# %% [markdown]
# ## Answer
#
# They do the same: with C and B turned to their positions, their inner products depend on the
# positions through the distance alone, to rounding, and SSD stays a recurrence, one whose state
# turns as it fades. In the small model trained here, attention binds values to keys, one token
# apart, by its fast frequencies, and SSD finds the value asked for by slow ones, which hardly turn:
# rotation leaves C and B room for content. Whether it helps SSD is another question: two SSD layers
# solve this task with none of the three kinds of position in the steps given, and one seed each
# tells nothing of their order.
