"""Layers and blocks against transformers': Llama, Mamba-2, Jamba's experts, Doge's experts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab import peers
from lab.layers.attention import Attention
from lab.layers.cdmoe import CDMoE
from lab.layers.mlp import MLP
from lab.layers.routed import RoutedMoE, imbalance, measure_share
from lab.layers.ssd import SSD
from lab.models import Block
from lab.ops.rope import rotary_table
from tests.normal import draw_normal
from tests.parity.compare import assert_agree, config, deviation, draw_parameters, modules
from tests.parity.weights import mamba2_weights

D_MODEL, N_HEADS, N_KV_HEADS, D_FF, T = 24, 4, 2, 20, 19
SINGLE = 2**-24


def attention_sizes(**options: Any) -> dict[str, Any]:
    """The norms' ε is ours: machine precision, in fp32. Unmasked, eager attention is not causal."""
    sizes = {"num_attention_heads": N_HEADS, "num_key_value_heads": N_KV_HEADS}
    how = {"rms_norm_eps": 2**-23, "attn_implementation": "sdpa"}
    return {**sizes, **how, "intermediate_size": D_FF, **options}


def named(theirs: nn.Module, names: dict[str, str]) -> dict[str, Tensor]:
    """Their parameters by our names for them."""
    return {our: theirs.get_parameter(their) for our, their in names.items()}


BLOCK = {
    "norm_mixer.weight": "input_layernorm.weight",
    "mixer.q.weight": "self_attn.q_proj.weight",
    "mixer.k.weight": "self_attn.k_proj.weight",
    "mixer.v.weight": "self_attn.v_proj.weight",
    "mixer.out.weight": "self_attn.o_proj.weight",
}


def test_llama_block():
    """In fp32, as its norms are whatever the dtype."""
    layer = modules("llama").LlamaDecoderLayer(config("llama", D_MODEL, **attention_sizes()), 0)
    theirs = draw_parameters(layer, torch.float32)
    mixer = Attention(D_MODEL, N_HEADS, n_kv_heads=N_KV_HEADS)
    cos, sin = rotary_table(torch.arange(T), D_MODEL // N_HEADS)
    table = torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
    names = {
        "norm_mlp.weight": "post_attention_layernorm.weight",
        "mlp.gate.weight": "mlp.gate_proj.weight",
        "mlp.up.weight": "mlp.up_proj.weight",
        "mlp.down.weight": "mlp.down_proj.weight",
    }
    assert_agree(
        Block(D_MODEL, mixer, MLP(D_MODEL, d_ff=D_FF, gated=True)),
        named(theirs, BLOCK | names),
        theirs,
        lambda x: theirs(x, position_embeddings=table),
        draw_normal(2, T, D_MODEL, dtype=torch.float32),
    )


def jamba_experts(theirs: nn.Module) -> dict[str, Tensor]:
    gate, up = theirs.get_parameter("experts.gate_up_proj").mT.chunk(2, dim=-1)
    down = theirs.get_parameter("experts.down_proj").mT
    return {"router.weight": theirs.get_parameter("router.weight"), "gate": gate, "up": up} | {
        "down": down
    }


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_jamba_block(backend):
    """Attention without positions, then a router's 2 of 5 experts, weighted by less than one."""
    options = attention_sizes(num_experts=5, num_experts_per_tok=2, expert_layer_offset=0)
    layer = modules("jamba").JambaAttentionDecoderLayer(config("jamba", D_MODEL, **options), 0)
    theirs = draw_parameters(layer, torch.float32)
    mixer = Attention(D_MODEL, N_HEADS, n_kv_heads=N_KV_HEADS, position="none")
    experts = RoutedMoE(D_MODEL, n_experts=5, k=2, d_ff=D_FF, gated=True, backend=backend)
    weights = named(theirs, BLOCK | {"norm_mlp.weight": "pre_ff_layernorm.weight"})
    for name, weight in jamba_experts(theirs.get_submodule("feed_forward")).items():
        weights[f"mlp.{name}"] = weight
    assert_agree(
        Block(D_MODEL, mixer, experts),
        weights,
        theirs,
        theirs,
        draw_normal(2, T, D_MODEL, dtype=torch.float32),
    )


def test_jamba_balance_loss():
    """Theirs adds up the k choices' shares where ours takes their mean: k times as much."""
    logits, k = draw_normal(2 * T, 5, dtype=torch.float32), 2
    theirs = modules("jamba").load_balancing_loss_func((logits,), 5, k)
    scores = logits.softmax(-1)[None]
    ours = imbalance(scores, measure_share(scores.topk(k, dim=-1).indices, scores))
    torch.testing.assert_close(k * ours, theirs, rtol=8 * SINGLE, atol=0)


@pytest.mark.parametrize("n_groups", [1, 2])
def test_mamba2_mixer(n_groups):
    theirs, ours = mamba2(n_groups)
    assert_agree(
        ours,
        mamba2_weights(theirs, ours),
        theirs,
        theirs,
        draw_normal(2, T, D_MODEL, dtype=torch.float32),
    )


def test_mamba2_decodes_from_a_cache():
    theirs, ours = mamba2(n_groups=2)
    ours.load_state_dict(mamba2_weights(theirs, ours))
    cache = mamba2_cache()
    x = draw_normal(2, T, D_MODEL, dtype=torch.float32)
    y, state = ours.prefill(x[:, : T - 4])
    assert deviation(y, theirs(x[:, : T - 4], cache)) <= 64 * SINGLE
    for t in range(T - 4, T):
        y, state = ours.step(x[:, t], state)
        assert deviation(y, theirs(x[:, t : t + 1], cache)[:, 0]) <= 64 * SINGLE


def test_mamba2_left_padding():
    theirs, ours = mamba2(n_groups=2)
    ours.load_state_dict(mamba2_weights(theirs, ours))
    x = draw_normal(2, T, D_MODEL, dtype=torch.float32)
    keep = torch.arange(T) >= torch.tensor([[0], [5]])
    y, _ = ours.prefill(x, keep=keep)
    assert deviation(y[keep], theirs(x, attention_mask=keep)[keep]) <= 64 * SINGLE


def test_mamba2_right_padding_fades_the_state():
    """transformers 5.23.0 masks what a padded token writes, not its decay: dt is softplus(bias)."""
    theirs, ours = mamba2(n_groups=2)
    ours.load_state_dict(mamba2_weights(theirs, ours))
    x = draw_normal(2, T, D_MODEL, dtype=torch.float32)
    keep = torch.arange(T).expand(2, T) < T - 6
    exact = ours.prefill(x[:, : T - 6])[1].ssm
    assert deviation(ours.prefill(x, keep=keep)[1].ssm, exact) <= 64 * SINGLE
    cache = mamba2_cache()
    theirs(x, cache, attention_mask=keep)
    assert deviation(cache.get_recurrent_state(0), exact) > 0.3


def test_mamba2_limits_dt_in_prefill_alone():
    """transformers 5.23.0 holds time_step_limit in the scan, not in the step of decoding."""
    theirs, _ = mamba2(n_groups=2, time_step_limit=(0.0, 0.1))
    x = draw_normal(2, T, D_MODEL, dtype=torch.float32)
    whole, cache = theirs(x), mamba2_cache()
    theirs(x[:, :-1], cache)
    stepped = theirs(x[:, -1:], cache)
    assert deviation(stepped[:, 0], whole[:, -1]) > 0.3


def mamba2(n_groups: int, **options: Any) -> tuple[nn.Module, SSD]:
    """Their mixer, its weights drawn, and ours of the same sizes; several chunks, and a part."""
    sizes = {"num_heads": 4, "head_dim": 12, "state_size": 6, "num_hidden_layers": 1}
    settings = config("mamba2", D_MODEL, n_groups=n_groups, chunk_size=8, **sizes, **options)
    theirs = draw_parameters(modules("mamba2").Mamba2Mixer(settings, 0), torch.float32)
    mamba2_options: dict[str, Any] = {"position": "conv", "gate": "norm", "d_inner": 2 * D_MODEL}
    return theirs, SSD(D_MODEL, 4, d_state=6, n_groups=n_groups, chunk_len=8, **mamba2_options)


def mamba2_cache() -> Any:
    settings = config("mamba2", D_MODEL, num_heads=4, head_dim=12, num_hidden_layers=1)
    return peers.load("transformers.cache_utils").DynamicCache(config=settings)


def doge_experts() -> tuple[nn.Module, CDMoE, dict[str, Tensor]]:
    """Doge's router scores rows and columns itself: our keys are units, our query is its router."""
    options = {"intermediate_size": D_FF, "num_experts": 16, "num_experts_per_tok": 5}
    theirs = draw_parameters(modules("doge").DogeCDMoE(config("doge", D_MODEL, **options)))
    ours = CDMoE(
        D_MODEL,
        n_experts=16,
        n_retrieval_heads=1,
        k=5,
        d_retrieval=8,
        d_ff=D_FF,
        form="one",
        gated=True,
    )
    names = {
        "query.weight": "router_gate.weight",
        "down": "down_embed.weight",
        "up": "up_embed.weight",
        "cross_domain.gate.weight": "gate_proj.weight",
        "cross_domain.up.weight": "up_proj.weight",
        "cross_domain.down.weight": "down_proj.weight",
    }
    units = torch.eye(4, dtype=torch.float64)[None]
    weights = named(theirs, names) | {"row_keys": units, "column_keys": units}
    return theirs, ours.double(), weights


def test_doge_experts_token_by_token():
    """Form one, the score outside σ, a gated φ, one head: Doge's reading of a single token."""
    theirs, ours, weights = doge_experts()
    assert_agree(
        ours,
        weights,
        theirs,
        lambda x: torch.cat([theirs(token)[0] for token in x.split(1, dim=1)], dim=1),
        draw_normal(1, T, D_MODEL),
    )


def test_doge_experts_mix_tokens():
    """transformers 5.23.0 takes the halves of all tokens' logits together for rows and columns.

    A token's experts are then chosen by other tokens' logits, later ones among them. Its source
    says so, and keeps it for the sake of existing checkpoints.
    """
    theirs, ours, weights = doge_experts()
    x = draw_normal(1, T, D_MODEL)
    other = torch.cat([x[:, : T - 1], draw_normal(1, 1, D_MODEL, seed=2)], 1)
    assert deviation(theirs(other)[0][:, : T - 1], theirs(x)[0][:, : T - 1]) > 0.01
    for name, weight in weights.items():
        ours.get_parameter(name).data = weight.detach()
    assert torch.equal(ours(other)[:, : T - 1], ours(x)[:, : T - 1])
    assert deviation(theirs(x)[0], ours(x)) > 0.01
