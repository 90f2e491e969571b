"""An SSD layer's recurrence: numbers by loops, planted decays and ranks, every variant."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.mixing import BlockMixer
from analysis.state_space.erasure import follow, name_writes, trace
from analysis.state_space.rank import effective_rank, rank
from analysis.state_space.recurrence import FamilyRecurrence, SSDRecurrence, is_followed
from lab.layers.family.gla import GatedLinearAttention
from lab.layers.family.retnet import Retention
from lab.layers.recurrence import Recurrence, Terms
from lab.layers.ssd import SSD
from lab.models.mixers import MIXERS
from lab.ops.delta import delta_states
from lab.ops.ssd_forms import scan_states, state_writes
from tests.normal import draw_normal
from tests.ssd_variants import matrix_without_skip, moved

VARIANTS: list[dict[str, Any]] = [
    {"position": "none"},
    {"position": "decay", "n_groups": 1, "skip": False},
    {"position": "conv", "gate": "norm", "d_inner": 24},
    {"groups": "tiled", "dt_init": "paper"},
]
every_variant = pytest.mark.parametrize("options", VARIANTS, ids=str)


def recurrence(module: SSD, x: Tensor | None = None) -> SSDRecurrence:
    with torch.no_grad():
        return SSDRecurrence.of(BlockMixer(0, module, draw_normal(2, 11, 12) if x is None else x))


def constant(a: float, dt: float = 1.0, **options: Any) -> SSD:
    """Return a layer that decays by a at every token, whatever the tokens."""
    module = moved(position="decay", **options)
    with torch.no_grad():
        assert module.A_log is not None
        module.A_log.fill_(math.log(-a / dt))
        module.dt_proj.weight.zero_()
        module.dt_proj.bias.fill_(math.log(math.expm1(dt)))
    return module


@every_variant
@pytest.mark.parametrize("block", [2**22, 50])
@torch.no_grad()
def test_contexts_are_the_smallest_windows(options, block, monkeypatch):
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", block)
    module = moved(**options)
    found = recurrence(module)
    matrix = matrix_without_skip(module, found.mixer.x).float()
    for row in range(2):
        contexts = found.measure_contexts(row)
        for h in range(4):
            for i in range(11):
                size = matrix[row, h, i, : i + 1].abs().tolist()
                window = next(
                    w for w in range(1, i + 2) if sum(size[i + 1 - w :]) >= 0.9 * sum(size)
                )
                assert contexts[h, i] == window


@every_variant
@pytest.mark.parametrize("entries", [2**19, 1])
@torch.no_grad()
def test_singular_values_are_those_of_the_block(options, entries, monkeypatch):
    monkeypatch.setattr("analysis.state_space.recurrence.FACTORED", entries)
    module = moved(**options)
    found = recurrence(module)
    matrix = matrix_without_skip(module, found.mixer.x)
    for split in (1, 5, 10):
        block = matrix[:, :, split:, :split]
        sigma = found.singular_values(split)
        expected = torch.linalg.svdvals(block)
        k = min(sigma.shape[-1], expected.shape[-1])
        torch.testing.assert_close(sigma[..., :k], expected[..., :k], rtol=1e-9, atol=1e-12)
        assert not (sigma[..., k:].abs() > 1e-12).any()
        assert not (expected[..., k:].abs() > 1e-12).any()
        # The law: what the state carries is at most as wide as the state.
        assert (rank(sigma, (11 - split, split)) <= min(6, split, 11 - split)).all()


@every_variant
@torch.no_grad()
def test_shares_of_decay_by_loops(options, monkeypatch):
    monkeypatch.setattr("analysis.state_space.recurrence.BLOCK_ENTRIES", 100)
    module = moved(**options)
    found = recurrence(module)
    for h in range(4):
        content, decay = [], []
        for i in range(11):
            for j in range(i):
                b, c = found.B[1, j], found.C[1, i]
                group = h // (4 // len(b))
                content.append(math.log(abs(float(b[group] @ c[group]))))
                decay.append(sum(float(found.log_decay[1, k, h]) for k in range(j + 1, i + 1)))
        c, d = np.array(content), np.array(decay)
        # The scores are of one precision here and in the code, summed in another order.
        share = float(found.measure_decay_share(1)[h])
        assert share == pytest.approx(d.var() / (c + d).var(), rel=1e-6, abs=1e-9)


@every_variant
@torch.no_grad()
def test_writes_and_reads_are_the_recurrences(options):
    module = moved(**options)
    found = recurrence(module)
    B = found.B.repeat_interleave(4 // found.B.shape[2], dim=2)
    C = found.C.repeat_interleave(4 // found.C.shape[2], dim=2)
    writes = state_writes(found.values, found.dt, B)
    torch.testing.assert_close(found.writes, writes.flatten(3).norm(dim=-1))
    states = scan_states(writes, found.log_decay)
    torch.testing.assert_close(found.reads, torch.einsum("bthpn,bthn->bthp", states, C))
    torch.testing.assert_close(
        matrix_without_skip(module, found.mixer.x) @ module.values(found.mixer.x),
        found.reads.transpose(1, 2),
    )


@pytest.mark.parametrize("a", [-0.01, -3.0])
def test_a_known_decay_has_its_half_life(a):
    found = recurrence(constant(a))
    torch.testing.assert_close(
        found.half_lives, torch.full((4,), math.log(2) / -a, dtype=torch.float64)
    )


def test_without_decay_nothing_is_forgotten():
    found = recurrence(moved(position="none"))
    assert (found.half_lives == math.inf).all()
    assert (found.measure_decay_share(0) == 0).all()


def same_everywhere(module: SSD) -> SSDRecurrence:
    """Return what a layer does to a token that is repeated: B, C and x are constant."""
    return recurrence(module, draw_normal(1, 1, 12).expand(1, 40, 12))


def test_one_direction_has_rank_one_and_all_alike_have_full_rank():
    sigma = same_everywhere(constant(-0.1)).singular_values(20)
    assert (rank(sigma, (20, 20)) == 1).all()
    torch.testing.assert_close(effective_rank(sigma), torch.ones(1, 4, dtype=torch.float64))
    alike = torch.full((3, 5), 0.7)
    assert (rank(alike, (9, 9)) == 5).all()
    torch.testing.assert_close(effective_rank(alike), torch.full((3,), 5.0))


@pytest.mark.parametrize("kept", [1, 3])
def test_planted_directions_are_counted(kept):
    """B lives in `kept` of the state's channels."""
    module = constant(-0.1)
    with torch.no_grad():
        weight = module.B_proj.weight.unflatten(0, (2, 6))
        weight[:, kept:] = 0
    sigma = recurrence(module).singular_values(5)
    assert (rank(sigma, (6, 5)) == kept).all()
    assert (effective_rank(sigma) <= kept + 1e-9).all()


def test_scale_changes_no_rank_share_or_context():
    module = moved()
    before = recurrence(module)
    with torch.no_grad():
        module.B_proj.weight.mul_(-7)
        module.C_proj.weight.mul_(0.3)
    after = recurrence(module)
    assert torch.equal(after.measure_contexts(0), before.measure_contexts(0))
    torch.testing.assert_close(after.measure_decay_share(0), before.measure_decay_share(0))
    sigmas = after.singular_values(5), before.singular_values(5)
    torch.testing.assert_close(effective_rank(sigmas[0]), effective_rank(sigmas[1]))
    torch.testing.assert_close(sigmas[0], 2.1 * sigmas[1])


FAMILY = [
    name
    for name, kind in MIXERS.items()
    if issubclass(kind.cls, Recurrence) and is_followed(kind.cls(8))
]


def family(name: str) -> tuple[Recurrence, FamilyRecurrence]:
    torch.manual_seed(0)
    module: Any = MIXERS[name].cls(12, 2).double()
    with torch.no_grad():
        return module, FamilyRecurrence.of(BlockMixer(0, module, draw_normal(2, 11, 12)))


@pytest.mark.parametrize("name", FAMILY)
@torch.no_grad()
def test_the_family_carries_what_its_matrix_shows(name, monkeypatch):
    monkeypatch.setattr("analysis.state_space.recurrence.FACTORED", 1)
    module, found = family(name)
    matrix = module.matrix(found.mixer.x)[:, : 2 * found.n_writes]
    # A head's writes stand side by side.
    matrix = matrix.unflatten(1, (found.n_writes, 2)).transpose(1, 2)
    for split in (1, 5, 10):
        block = matrix[..., split:, :split].movedim(2, -1).flatten(-2)
        sigma, expected = found.singular_values(split), torch.linalg.svdvals(block)
        k = min(sigma.shape[-1], expected.shape[-1])
        torch.testing.assert_close(sigma[..., :k], expected[..., :k], rtol=1e-6, atol=1e-9)
        assert not (expected[..., k:].abs() > 1e-9).any()
        assert sigma.shape[-1] <= found.width
    for row in range(2):
        shown = torch.cat([block for _, block in found.blocks(row)], 1)
        torch.testing.assert_close(
            shown,
            matrix[row]
            .norm(dim=1)
            .float()
            .where(torch.tensor(found.n_writes > 1), matrix[row, :, 0].float()),
        )
        assert found.measure_contexts(row).shape == (2, 11)


@pytest.mark.parametrize("name", FAMILY)
@torch.no_grad()
def test_what_the_family_writes_reads_and_keeps_is_the_recurrences(name):
    module, found = family(name)
    terms, m = found.terms, found.n_writes
    for b, t, h in ((0, 0, 0), (1, 7, 1)):
        k, v = (z[b, t].reshape(m, 2, -1)[:, h] for z in (terms.k, terms.v))
        size = [float(k[i].outer(v[i]).norm()) for i in range(m)]
        assert float(found.writes[b, t, h]) == pytest.approx(math.hypot(*size))
        kept = 1.0 if terms.log_decay is None else terms.log_decay[b, t, h].exp().mean()
        assert float(found.kept[b, t, h]) == pytest.approx(float(kept))
    if m == 1 and terms.own is None and not module.normalised:
        options: Any = {"match_before_decay": module.match_before_decay}
        states = delta_states(terms.k, terms.v, *terms[3:6], **options)
        read = torch.einsum("bthnp,bthn->bthp", states, terms.q)
        torch.testing.assert_close(found.reads, read)
    assert found.measure_decay_share(0).isnan().all()


@torch.no_grad()
def test_a_planted_decay_of_the_family_has_its_half_life():
    retention = Retention(12, 3)
    found = FamilyRecurrence.of(BlockMixer(0, retention, draw_normal(1, 9, 12).float()))
    rates = 1 - 2.0 ** -(5 + np.arange(3))  # of the heads, as published
    np.testing.assert_allclose(found.half_lives, math.log(2) / -np.log(rates), rtol=1e-4)
    gated = GatedLinearAttention(12, 2)
    gated.decay_up.weight.zero_()
    gated.decay_up.bias.zero_()  # every channel keeps σ(0)^{1/16}
    found = FamilyRecurrence.of(BlockMixer(0, gated, draw_normal(1, 9, 12).float()))
    np.testing.assert_allclose(found.half_lives, 16.0, rtol=1e-5)


@pytest.mark.parametrize("name", [*FAMILY, "ssd"])
@torch.no_grad()
def test_what_is_held_of_each_write_adds_up_to_the_state(name):
    if name == "ssd":
        module, found = None, recurrence(moved(position="conv"))
    else:
        module, found = family(name)
    before_decay = module is not None and module.match_before_decay
    terms, m = found.terms, found.terms.k.shape[2] if found.terms.k.ndim == 5 else 1
    followed = list(follow(terms, name_writes(terms), match_before_decay=before_decay))
    values = terms.v.reshape(2, 11 * m, *terms.v.shape[-2:]).transpose(1, 2)
    held, decayed, erased = (
        torch.stack([part.mT @ values for part in parts], 1)
        for parts in zip(*followed, strict=True)
    )
    states = delta_states(terms.k, terms.v, *terms[3:6], match_before_decay=before_decay)
    torch.testing.assert_close(held, states)
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    if m == 1:  # what is written is all that a token changes besides
        written = torch.einsum("bthn,bthp->bthnp", terms.k, terms.v)
        torch.testing.assert_close(before - decayed - erased + written, states)
    if module is not None and terms.own is None and not module.normalised:
        reads = torch.stack([part[0] for part in followed], 1).transpose(1, 2)
        M = torch.einsum("bthn,bhtsn->bhts", terms.q, reads)
        shown = module.matrix(found.mixer.x)[:, : 2 * m].unflatten(1, (m, 2))  # a head a write
        torch.testing.assert_close(M.unflatten(-1, (11, m)), shown.movedim(1, -1))
    traced = trace(found)
    lost = torch.stack([part[1] for part in followed], 2)  # [b h t w n]
    keys = terms.k.reshape(2, 11 * m, *terms.k.shape[-2:]).transpose(1, 2)
    weight = (keys.norm(dim=-1) * values.norm(dim=-1)).square()
    share = torch.einsum("bhtwn,bhwn->bhtw", lost, keys) / keys.square().sum(-1)[:, :, None]
    share = (share * weight[:, :, None]).unflatten(-1, (11, m)).sum(-1) / traced.weight[:, :, None]
    total = traced.held + (traced.erased + share).cumsum(2)
    torch.testing.assert_close(total, torch.ones_like(total).tril())
    assert (traced.erased == 0).all() == (terms.match is None)
    torch.testing.assert_close(traced.size, before.flatten(3).norm(dim=-1))
    for i, part in enumerate((decayed, erased), 1):
        torch.testing.assert_close(traced.tokens[i], part.flatten(3).norm(dim=-1))
    assert (traced.tokens[3] <= 1 + 1e-9).all()


@torch.no_grad()
def test_a_delta_rule_erases_what_its_key_held_and_no_other():
    """Keys are axes: a write with β = ¾ takes ¾ of what is there, after a decay to ½."""
    module, found = family("gdn")
    keys = torch.eye(6).double()[torch.tensor([0, 1, 0, 2, 1, 0])][None, :, None]
    ones = torch.ones(1, 6, 1).double()
    terms = Terms(keys, 0.75 * keys, keys, math.log(0.5) * ones, keys)
    x = draw_normal(1, 6, 12)
    found = FamilyRecurrence(BlockMixer(0, module, x), math.log(0.5) * ones, keys, terms)
    traced = trace(found)
    erased = {(2, 0): 0.75 / 4, (4, 1): 0.75 / 8, (5, 0): 0.75 / 128, (5, 2): 0.75 / 8}
    for (t, s), share in erased.items():
        assert float(traced.erased[0, 0, t, s]) == pytest.approx(share)
        traced.erased[0, 0, t, s] = 0
    assert not traced.erased.any()
    assert float(traced.held[0, 0, 5, 0]) == pytest.approx(0.25**2 / 32)
    assert float(traced.held[0, 0, 5, 3]) == pytest.approx(0.25)
    torch.testing.assert_close(traced.tokens[4], 0.75 * ones)  # β
    overlap = [0, 0, 1 / math.sqrt(5), 0, 1 / math.hypot(17 / 8, 1, 4)]
    assert traced.tokens[3, 0, :5, 0].tolist() == pytest.approx(overlap)
