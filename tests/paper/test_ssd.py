"""Errata S1 to S4: state space duality, as printed and as meant."""

import math

import pytest
import torch
import torch.nn.functional as F
from einops import EinopsError, rearrange
from torch import Tensor

from lab.layers.printed.ssd import ssd_by_chunk_matrix
from lab.layers.ssd import SSD
from lab.ops.ssd import ssd
from lab.ops.ssd_forms import ssd_recurrent
from tests.normal import draw_normal
from tests.paper.conftest import Run


def inputs(t: int, h: int, g: int) -> tuple[Tensor, ...]:
    x, B, C = (
        draw_normal(1, t, h, 3),
        draw_normal(1, t, g, 4, seed=1),
        draw_normal(1, t, g, 4, seed=2),
    )
    return x, draw_normal(1, t, h, seed=3).exp() / 4, -torch.arange(1.0, h + 1).double(), B, C


PATTERNS = ["bt(hp)->bthp", "b(lc)h->blch", "blchn->blc1hn", "bclh->bhcl", "bthp->bt(hp)"]


@pytest.mark.parametrize("pattern", [*PATTERNS, "...->...1"])
def test_s1_einops_reads_letters_without_spaces_as_one_name(pattern: str):
    with pytest.raises(EinopsError, match="dentifier"):
        rearrange(torch.ones(2, 6, 8), pattern)


def test_s1_the_listings_cannot_run(erratum: Run):
    found = erratum("S1")
    errors = found.printed_evidence
    for kind in ("Syntax", "Indentation", "Einops", "Runtime", "Attribute", "Name"):
        assert f"{kind}Error" in errors
    assert "length 6 in chunks of 4" in errors
    args = inputs(10, 2, 1)
    torch.testing.assert_close(ssd(*args, chunk_len=4)[0], ssd_recurrent(*args)[0])


def test_s2_summed_over_the_target_a_chunk_sees_its_future():
    """Three chunks of two, one head, state and channel, decays by hand."""
    a = torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]).double()
    x = torch.tensor([1.0, 2, 3, 5, 7, 11]).double()
    ones = torch.ones(1, 6, 1).double()

    def run(summed, a: Tensor = a) -> Tensor:
        # dt = 1 for the write; A = −1 with dt = −a would scale the write too.
        dt = -a.view(1, 6, 1)
        values = (x.view(1, 6, 1) / dt)[..., None]
        A = torch.tensor([-1.0]).double()
        return ssd_by_chunk_matrix(values, dt, A, ones, ones, 2, summed)[0, :, 0, 0]

    def decay(*tokens: int) -> float:
        return math.exp(sum(a[k] for k in tokens))

    first = 1 * decay(1) + 2
    second = 3 * decay(3) + 5
    meant = [1, first, first * decay(2) + 3, first * decay(2, 3) + second]
    torch.testing.assert_close(run("source")[:4], torch.tensor(meant).double())
    # Chunk 1 is scaled by all decays after its start, chunk 2 has lost chunk 0.
    scale = 1 + decay(2, 3) + decay(2, 3, 4, 5)
    assert run("target")[2].item() == pytest.approx(scale * first * decay(2) + 3)
    last = (1 + decay(4, 5)) * second * decay(4) + 7
    assert run("target")[4].item() == pytest.approx(last)
    later = a.clone()
    later[5] = -1.6
    moved = (run("target", later) - run("target"))[:4]
    assert moved[:2].abs().max() == 0
    assert moved[2:].abs().min() > 1e-2
    assert torch.equal(run("source", later)[:5], run("source")[:5])


@pytest.mark.parametrize("t", [1, 3, 8, 11])
@pytest.mark.parametrize("chunk_len", [1, 4, 16])
def test_s2_the_source_is_the_recurrence_and_the_target_only_within_a_chunk(t: int, chunk_len: int):
    x, dt, A, B, C = inputs(t, 2, 1)
    right = ssd_recurrent(x, dt, A, B, C)[0]
    by = {
        summed: ssd_by_chunk_matrix(x, dt, A, B[:, :, 0], C[:, :, 0], chunk_len, summed)
        for summed in ("source", "target")
    }
    torch.testing.assert_close(by["source"], right, rtol=0, atol=1e-12)
    if t <= chunk_len:
        torch.testing.assert_close(by["target"], right, rtol=0, atol=1e-12)
    else:
        assert (by["target"] - right).abs().max() > 1e-2


def test_s3_tiled_groups_are_other_groups(erratum: Run):
    x, dt, A, B, C = inputs(9, 4, 2)
    grouped = ssd(x, dt, A, B, C)[0]
    for order, right in (([0, 0, 1, 1], True), ([0, 1, 0, 1], False)):
        assert torch.allclose(ssd(x, dt, A, B[:, :, order], C[:, :, order])[0], grouped) == right
    assert torch.arange(2).repeat(2).tolist() == [0, 1, 0, 1]
    assert torch.arange(2).repeat_interleave(2).tolist() == [0, 0, 1, 1]
    found = erratum("S3")
    assert "[0, 1, 0, 1]" in found.printed_evidence
    assert "[0, 0, 1, 1]" in found.meant_evidence


def test_s4_one_printed_head_halves_at_each_token(erratum: Run):
    layer = SSD(8, 1, d_state=2, dt_init="paper").double()
    assert layer.dt_proj.bias is None
    assert layer.A_log is not None
    assert layer.A_log.item() == 0
    # Without an input dt = softplus(0) = log 2.
    dt = F.softplus(layer.dt_proj(torch.zeros(1, 1, 8).double()))
    keeps = (-dt * layer.A_log.exp()).exp().item()
    assert keeps == pytest.approx(0.5)
    assert keeps**32 == pytest.approx(2.3e-10, rel=0.02)
    found = erratum("S4")
    assert f"{0.5**32:.1e} after 32" in found.printed_evidence


def test_s4_mamba2_starts_dt_between_a_thousandth_and_a_tenth():
    torch.manual_seed(0)
    layer = SSD(64, 64, d_state=2)
    dt = F.softplus(layer.dt_proj.bias)
    assert layer.A_log is not None
    assert 0.00099 < dt.min() < dt.max() < 0.1001
    assert 0.99 < layer.A_log.exp().min() < layer.A_log.exp().max() < 16.01
    assert math.log(2) / (dt * layer.A_log.exp()).min() > 100
