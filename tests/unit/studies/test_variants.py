"""Variants of attention: each differs from attention in one thing."""

import pytest
import torch

from lab.layers.attention import Attention
from lab.studies.variants import (
    AlignedAttention,
    ConvolvedAttention,
    NearIdentityAttention,
    NormedAttention,
    PartialRotary,
    ShiftedKeys,
)


def test_rotating_all_channels_is_attention():
    torch.manual_seed(0)
    plain, partial = Attention(16, 2), PartialRotary(16, 2, share=1.0)
    partial.load_state_dict(plain.state_dict())
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(partial(x), plain(x))


def test_rotating_part_leaves_the_other_channels():
    torch.manual_seed(0)
    layer, x = PartialRotary(16, 2, share=0.5), torch.randn(1, 5, 16)
    with torch.no_grad():
        q, _ = layer._project_and_rotate(x, torch.arange(5))
        bare = layer.q(x).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(q[..., 4:], bare[..., 4:])
    assert not torch.isclose(q[:, :, 1:, :4], bare[:, :, 1:, :4]).all()
    with pytest.raises(ValueError, match=r"share=0\.3"):
        PartialRotary(16, 2, share=0.3)


def test_variants_are_attention_but_for_one_thing():
    torch.manual_seed(0)
    plain, x = Attention(16, 2), torch.randn(2, 9, 16)
    convolved = ConvolvedAttention(16, 2)
    convolved.attention.load_state_dict(plain.state_dict())
    with torch.no_grad():
        convolved.convolution.weight.zero_()[:, -1] = 1
        convolved.convolution.bias.zero_()
    torch.testing.assert_close(convolved(x), plain(x))
    # Where every token is the same, the keys before are those here, but for the first token.
    shifted, same = ShiftedKeys(16, 2), x[:, :1].expand(-1, 9, -1)
    shifted.attention.load_state_dict(plain.state_dict())
    torch.testing.assert_close(shifted(same), plain(same))
    assert not torch.isclose(shifted(x), plain(x)).all()


def test_normed_queries_do_not_know_their_scale():
    torch.manual_seed(0)
    layer, x = NormedAttention(16, 2), torch.randn(2, 9, 16)
    before = layer(x)
    with torch.no_grad():
        layer.q.weight.mul_(7)
    torch.testing.assert_close(layer(x), before)


def test_aligned_queries_and_keys_are_what_the_layer_reads():
    layer, x = AlignedAttention(16, noise=0.0), torch.randn(2, 9, 16)
    torch.testing.assert_close(layer.q(x), x)
    torch.testing.assert_close(layer.k(x), x)


def test_values_near_identity_come_out_as_they_went_in():
    layer, x = NearIdentityAttention(64, noise=0.0), torch.randn(1, 1, 64)
    torch.testing.assert_close(layer(x), x)
