"""Decoders whose steps differ from their prefill, whose positions are not relative, or that read
padding."""

import torch
import torch.nn.functional as F
from torch import nn

from lab.layers.state import token_positions
from tests.planted.attention import D_MODEL, HEADS, DocumentAttention, RightAttention, rotate
from tests.planted.cached import GROUPS, CachedAttention, NormedSum, StateBeside, WindowedCache
from tests.planted.entry import Row, plant
from tests.planted.scanned import StateSpace
from tests.planted.scans import CHUNK


def _cache_leaks(self, t, after):
    s = after.k.shape[2]
    return torch.ones(t, s, dtype=torch.bool).tril(s - t + 1) & after.kept[:, None]


def _stale(self, x, state=None, keep=None):
    y, after = CachedAttention.prefill(self, x, state, keep)
    return (y, after if state is None else state._replace(position=after.position))


def _in_place(self, x, state):
    y, after = StateSpace.step(self, x, state)
    state.window.copy_(after.window)
    state.hidden.copy_(after.hidden)
    return (y, after)


def _position_of_chunk(self, before, k, v, kept, position):
    read = position - before.position if k.shape[2] > 1 else position
    return CachedAttention._extend(self, before, k, v, kept, read)


def _tiled_groups(self, z, t):
    if t == 1:
        return z.repeat(1, HEADS // GROUPS, 1, 1)
    return CachedAttention._repeat_groups(self, z, t)


def _turned_again(self, k, positions):
    k = CachedAttention._rotate_key(self, k, positions)
    return CachedAttention._rotate_key(self, k, positions) if positions.shape[1] == 1 else k


def _scores_by_length(self, q, positions):
    own = torch.arange(q.shape[2])[None]
    count = 1 + (own if q.shape[2] > 1 else positions).to(q)
    return CachedAttention._rotate_query(self, q * (1 + count.log())[:, None, :, None], positions)


def _no_carry(self, added, whole, hidden):
    before, last = StateSpace._carry(self, added, whole, hidden)
    return (torch.cat([before[:1], torch.zeros_like(before[1:])]), last)


def _last_state_of_padding(self, u, rate, B, C, hidden):
    y, last = StateSpace._run_chunks(self, u, rate, B, C, hidden)
    spare = -u.shape[1] % CHUNK
    return (y, last * 0.99**spare)


def _capacityprefill(self, x, state=None, keep=None):
    y, after = StateSpace.prefill(self, x, state, keep)
    inside = torch.arange(x.shape[1]) < 24
    return (y + self.expert(y).relu() * inside[:, None], after)


def _capacitystep(self, x, state):
    y, after = StateSpace.step(self, x, state)
    return (y + self.expert(y).relu(), after)


def _two_layouts(self, k, positions):
    order = torch.tensor([0, 2, 1, 3])
    return rotate(k[..., order], positions)[..., order]


def _carries_normed(self, x, state=None):
    y, _ = NormedSum.step(self, x, state)
    return (y, y)


def _reads_padding(self, t, after):
    s = after.k.shape[2]
    return torch.ones(len(after.k), t, s, dtype=torch.bool).tril(s - t)


def _last_part_only(self, before, k, v, kept, position):
    earlier = before._replace(kept=torch.ones_like(before.kept))
    return CachedAttention._extend(self, earlier, k, v, kept, position)


def _padding_advances(self, x, state=None, keep=None):
    y, after = CachedAttention.prefill(self, x, state, keep)
    began = 0 if state is None else state.position
    return (y, after._replace(position=torch.zeros_like(after.position) + began + x.shape[1]))


def _exp_then_mask(self, scores, seen):
    powers = scores.exp().where(seen, 0)
    return powers / powers.sum(-1, keepdim=True).clamp(min=1e-30)


def _root_of_zero(self, x, state=None, keep=None):
    kept = x if keep is None else x * keep[..., None]
    return CachedAttention.prefill(self, self._normalise(kept), state, keep)


def _padding_decays(self, x, state=None, keep=None):
    y, after = StateSpace.prefill(self, x, state, keep)
    if keep is None:
        return (y, after)
    over = 0.95 ** (~keep).sum(1).to(x)
    return (y, after._replace(hidden=after.hidden * over[:, None, None, None]))


def _padding_from_left(self, x, state=None, keep=None):
    if keep is not None:
        first = keep.int().argmax(1, keepdim=True)
        keep = (torch.arange(x.shape[1]) >= first) & keep.any(1, keepdim=True)
    return StateSpace.prefill(self, x, state, keep)


DECODING = (
    *plant(
        "causal",
        Row(
            "mask off by one beside a cache",
            CachedAttention,
            also=("prefill = step", "padding"),
            _make_mask=_cache_leaks,
        ),
    ),
    *plant(
        "prefill = step",
        Row("cache not extended", CachedAttention, prefill=_stale),
        Row("cache changed in place", StateSpace, step=_in_place),
        Row(
            "step at position zero",
            CachedAttention,
            _get_step_position=lambda self, state: torch.zeros_like(state.position),
        ),
        Row(
            "step one position late",
            CachedAttention,
            _get_step_position=lambda self, state: state.position + 1,
        ),
        Row(
            "prefill goes on at position zero",
            CachedAttention,
            _compute_positions=lambda self, x, before, keep: token_positions(
                x.shape[1], x.device, None, keep
            ).expand(x.shape[:2]),
        ),
        Row(
            "position of the last part only",
            CachedAttention,
            also=("relative",),
            _extend=_position_of_chunk,
        ),
        Row(
            "groups tiled in a step",
            CachedAttention,
            also=("causal", "padding"),
            _repeat_groups=_tiled_groups,
        ),
        Row("key turned twice in a step", CachedAttention, _rotate_key=_turned_again),
        Row(
            "window one short in a step",
            WindowedCache,
            _choose_window=lambda self, t, s: 7 if t == 1 and s > 1 else 8,
        ),
        Row(
            "scale counts the last part only",
            CachedAttention,
            also=("padding",),
            relative=False,
            _rotate_query=_scores_by_length,
        ),
        Row(
            "convolution's state one short",
            StateSpace,
            _slide=lambda self, window, z: F.pad(
                StateSpace._slide(self, window, z)[:, 1:], (0, 0, 1, 0)
            ),
        ),
        Row(
            "convolution's state in wrong order",
            StateSpace,
            _slide=lambda self, window, z: torch.cat([z[:, None], window[:, :-1]], 1),
        ),
        Row("step without D", StateSpace, _add_step_skip=lambda self, y, u: y),
        Row(
            "step without the rate's bias",
            StateSpace,
            _compute_step_rate=lambda self, dt: F.softplus(dt),
        ),
        Row(
            "step with another softplus",
            StateSpace,
            _compute_step_rate=lambda self, dt: F.softplus(dt + self.rate_bias, threshold=1),
        ),
        Row("no carry from the second chunk on", StateSpace, _carry=_no_carry),
        Row(
            "carry decays twice",
            StateSpace,
            _carry=lambda self, added, whole, hidden: StateSpace._carry(
                self, added, whole**2, hidden
            ),
        ),
        Row(
            "state decays over the chunk's padding",
            StateSpace,
            also=("padding",),
            _run_chunks=_last_state_of_padding,
        ),
        Row(
            "capacity in prefill only",
            StateSpace,
            also=("padding",),
            notes="length above 24",
            adds={"expert": lambda: nn.Linear(D_MODEL, D_MODEL)},
            prefill=_capacityprefill,
            step=_capacitystep,
        ),
        Row(
            "state returned before the last token",
            StateBeside,
            _choose_state=lambda self, hs: hs[-2],
        ),
        Row("step goes on from its output", NormedSum, step=_carries_normed),
    ),
    *plant(
        "relative",
        Row(
            "absolute positions in the keys",
            CachedAttention,
            _rotate_key=lambda self, k, positions: CachedAttention._rotate_key(
                self, k + 0.1 * positions[:, None, :, None].to(k).sin(), positions
            ),
        ),
        Row(
            "values turned",
            CachedAttention,
            _rotate_value=lambda self, v, positions: rotate(v, positions),
        ),
        Row("two layouts of pairs", CachedAttention, _rotate_key=_two_layouts),
        Row(
            "table of angles ends",
            CachedAttention,
            notes="positions above 32,768",
            _rotate_query=lambda self, q, positions: rotate(q, positions.clamp(max=32768)),
            _rotate_key=lambda self, k, positions: rotate(k, positions.clamp(max=32768)),
        ),
    ),
    *plant(
        "padding",
        Row("padded keys attended", CachedAttention, _make_mask=_reads_padding),
        Row("padding attended once cached", CachedAttention, _extend=_last_part_only),
        Row(
            "padding moves the angles",
            CachedAttention,
            _compute_positions=lambda self, x, before, keep: CachedAttention._compute_positions(
                self, x, before, None
            ),
        ),
        Row("padding counts in the state", CachedAttention, prefill=_padding_advances),
        Row(
            "row of padding gives NaN",
            CachedAttention,
            _softmax=lambda self, scores, seen: scores.masked_fill(~seen, -torch.inf).softmax(-1),
        ),
        Row(
            "mask after the exponential", CachedAttention, notes="gradient", _softmax=_exp_then_mask
        ),
        Row(
            "root of zeroed padding",
            CachedAttention,
            notes="gradient",
            prefill=_root_of_zero,
            step=lambda self, x, state: CachedAttention.step(self, self._normalise(x), state),
            _normalise=lambda self, x: x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-06),
        ),
        Row(
            "first row's padding for all",
            CachedAttention,
            _make_mask=lambda self, t, after: CachedAttention._make_mask(
                self, t, after._replace(kept=after.kept[:1].expand_as(after.kept))
            ),
        ),
        Row("padding enters the recurrence", StateSpace, _mask_rate=lambda self, rate, kept: rate),
        Row("state decays over padding", StateSpace, prefill=_padding_decays),
        Row(
            "padding enters the convolution's state",
            StateSpace,
            _keep_window=lambda self, read, n_kept: read[:, -3:],
        ),
        Row(
            "mask ignored where nothing decodes",
            DocumentAttention,
            _find_keys=lambda self, attention_mask: torch.ones_like(attention_mask).bool(),
        ),
        Row(
            "mask of the first row for all",
            DocumentAttention,
            _find_keys=lambda self, attention_mask: (
                attention_mask[:1].expand(attention_mask.shape).bool()
            ),
        ),
        Row(
            "keys of padding weighed after the softmax",
            DocumentAttention,
            _weigh_seen=lambda self, scores, seen: RightAttention._weigh(self, scores) * seen,
            also=("documents do not mix",),
        ),
        Row("only left padding is known", StateSpace, prefill=_padding_from_left),
    ),
    *plant(
        "documents do not mix",
        Row(
            "documents ignored",
            DocumentAttention,
            _match=lambda self, seq_idx: torch.ones_like(seq_idx).bool()[:, None],
        ),
        Row(
            "next document seen one token late",
            DocumentAttention,
            _match=lambda self, seq_idx: (
                (
                    (
                        seq_idx[:, :, None] - F.pad(seq_idx, (0, 1), mode="replicate")[:, None, 1:]
                    ).abs()
                    < 1
                )
                | torch.eye(seq_idx.shape[1]).bool()
            ),
        ),
        Row(
            "positions go on in the next document",
            DocumentAttention,
            _split=lambda self, z: RightAttention._split(
                self, z + torch.arange(z.shape[1]).to(z)[:, None].sin()
            ),
        ),
    ),
)
