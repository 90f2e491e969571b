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
# # One matrix for attention and SSD
#
# Are attention and state space duality two ways of mixing a sequence, or one matrix filled in two
# ways, and what does the size of SSD's state take from it?

# %% [markdown]
# ## Three functions
#
# A mixer of the lab shows itself by `matrix(x)` [b h t s], `values(x)` [b h s p] and
# `project(x, z)`, and keeps to `forward(x) = project(x, matrix(x) @ values(x))`. A softmax fills
# the matrix of one, a recurrence that of the other. In fp64, on random inputs, what is left
# between the two sides should be rounding.

# %%
import torch

import lab
from analysis import matrices, state_space
from analysis.matrices import heads
from analysis.state_space import rank as state_rank
from lab.hooks import run_with_cache
from lab.layers.attention import Attention
from lab.layers.ssd import SSD
from tasks import TASKS

torch.manual_seed(0)
x = torch.randn(2, 32, 16, dtype=torch.float64)
layers = {
    "attention": Attention(16, n_heads=2).double(),
    "SSD": SSD(16, n_heads=2, d_state=8).double(),
}
gaps = {}
with torch.no_grad():
    for name, layer in layers.items():
        applied = layer.project(x, layer.matrix(x) @ layer.values(x))
        gaps[name] = (layer(x) - applied).abs().max().item()
        print(f"{name:10} matrix {list(layer.matrix(x).shape)}, off forward by {gaps[name]:.0e}")

# %% [markdown]
# ## What SSD writes into it
#
# Nothing is hidden in there. A hook point stands at each quantity of the paper, so we can read them
# off and fill the matrix entry by entry: what the query C_i makes of the key B_j, faded by all the
# decays between them, times the step dt_j; and D, the skip, on the diagonal.

# %%
ssd = layers["SSD"]
with torch.no_grad():
    _, seen = run_with_cache(ssd, x)
dt, a, B, C = (seen[f"hook_{name}"] for name in ("dt", "log_decay", "B_rot", "C_rot"))

filled = torch.zeros(2, 2, 32, 32, dtype=torch.float64)  # batch, heads, targets, sources
for b in range(2):
    for h in range(2):
        for i in range(32):
            for j in range(i + 1):
                fade = a[b, j + 1 : i + 1, h].sum().exp()
                filled[b, h, i, j] = fade * (C[b, i, 0] @ B[b, j, 0]) * dt[b, j, h]
            filled[b, h, i, i] += ssd.D[h].item()
print(f"off ssd.matrix(x) by {(filled - ssd.matrix(x)).abs().max():.0e}")

# %% [markdown]
# The same layer reads token by token, with a state of fixed size. Its states are hook points too;
# reading them with C gives again what the matrix gives.

# %%
read = torch.einsum("bthpn,btn->bthp", seen["hook_ssm_state"], C[:, :, 0])
mixed = read + ssd.D[:, None] * ssd.values(x).transpose(1, 2)
by_matrix = (ssd.matrix(x) @ ssd.values(x)).transpose(1, 2)
print(f"states {list(seen['hook_ssm_state'].shape)} [b t h p n]")
print(f"what they give is off the matrix by {(mixed - by_matrix).abs().max():.0e}")

# %% [markdown]
# ## Both in one model
#
# To see what training writes into such matrices, we train one model with an attention layer below
# and an SSD layer above, on a small recall task. D, the skip, is left out: on the diagonal it would
# outshine what the picture is about.

# %%
task = TASKS["mqar"](seq_len=16, n_pairs=4, vocab_size=32)
options = {"S.d_state": 32, "S.skip": False}
out = "runs/notebooks/hybrid"
run = lab.train(task, stack="AM SM", d_model=32, options=options, steps=600, out=out)
subject = run.subject
run

# %% [markdown]
# The same analysis draws both. Attention's rows are shares; SSD's entries have either sign, and its
# rows need not sum to anything. In either, rings mark where a query meets the value it asks for.

# %%
of_attention, of_ssd = matrices.measure(subject)
print(of_attention.says)
of_attention.figure()

# %%
print(of_ssd.says)
of_ssd.figure()

# %% [markdown]
# Whatever is said of attention heads can now be asked of SSD: how much of a head's mass lies on the
# token before, on repeated tokens, on what followed them; and how many keys it spreads over.

# %%
scores, reach = heads.measure(subject)
print(scores.says)
scores.figure()

# %%
print(reach.says)
reach.figure()

# %% [markdown]
# And some questions are SSD's own: how fast does it forget, and is the matrix's size decided by
# content, C·B, or by decay?

# %%
memory, *_ = state_space.measure(subject)
print(memory.says)
memory.figure()

# %% [markdown]
# ## What the state's size takes
#
# All that late tokens learn of early ones goes through the block of the matrix below the diagonal:
# late rows, early columns. SSD carries it in a state of `d_state` numbers a channel, so the block's
# rank can be no more; fast decay may leave less. Attention keeps every key. We cut 32 random inputs
# in the middle, where the rank can be 16, and take the highest of four heads.

# %%
candidates = {f"SSD, d_state {n}": SSD(16, n_heads=4, d_state=n) for n in (2, 4, 8, 16)}
candidates["attention"] = Attention(16, n_heads=4)
ranks = {}
with torch.no_grad():
    for name, layer in candidates.items():
        carried = layer.double().matrix(x)[:, :, 16:, :16]
        ranks[name] = torch.linalg.matrix_rank(carried).max().item()
        print(f"{name:15} rank {ranks[name]} of 16")

# %% [markdown]
# That is what can be. In how many directions the trained layer really carries its past, the
# spectrum of the block tells: its effective rank counts the directions that hold the energy.
# Rows of 16 tokens allow 8 at most.

# %%
(spectrum,) = state_rank.measure(subject)
print(spectrum.says)
spectrum.figure()

# %% [markdown]
# The numbers that the answer rests on:

# %%
print("forward against matrix:", ", ".join(f"{name} {gap:.0e}" for name, gap in gaps.items()))
for name, rank in ranks.items():
    print(f"{name:15} rank {rank} of 16")
induction = scores.patterns.index("induction")
print(f"trained: SSD's head has {scores.shares[1, induction]:.2f} of its mass ", end="")
print(f"where an induction head looks, uniform rows {scores.chance[induction]:.2f}")
middle = len(spectrum.splits) // 2
print(
    f"trained: effective rank {spectrum.effective_rank[middle].max():.1f} "
    f"of at most {spectrum.bound[middle].max()}"
)

# %% [markdown]
# ## Answer
#
# One matrix: both mixers are `project(x, matrix(x) @ values(x))` to rounding, and every picture,
# head score and intervention that goes by the matrix goes for both. They differ in what fills it: a
# softmax, or C·B faded by decay and signed. And in what may fill it: below the diagonal SSD's rank
# stops at `d_state`, where attention's, on the same random inputs, is as high as the block allows.
# In the tiny model trained here the SSD layer does what one knows from attention: it looks at
# what followed the same token earlier, four times as much as by chance.
