"""Public models are called as they want to be: transformers' models, their layers and caches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab.laws.adaptation import adapt
from lab.laws.probes import draw
from lab.laws.tokens import BITS, to_token_ids
from lab.peers import load

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {"intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**options: Any) -> nn.Module:
    of = load("transformers.models.llama")
    return of.LlamaForCausalLM(of.LlamaConfig(**SMALL, **HEADS, **options)).eval()


def gpt2() -> nn.Module:
    of = load("transformers.models.gpt2")
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return of.GPT2LMHeadModel(of.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)).eval()


def mamba2() -> nn.Module:
    of = load("transformers.models.mamba2")
    sizes = {"state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    return of.Mamba2ForCausalLM(of.Mamba2Config(**SMALL, **sizes)).eval()


def write_inner(
    cache: str, positioned: str = "", relative: str = "", output: str = "logits"
) -> str:
    called = f"advances=advance_cache, calls=call_model, cache={cache!r}, given='input_ids'"
    return (
        f"DecodingAdapter(module, {called}{positioned}, paddings=('left',){relative}, "
        f"output={output!r})"
    )


def difference(found: Tensor, asked: Tensor) -> float:
    return float((found - asked).abs().max() / asked.abs().max())


@pytest.mark.parametrize(
    ("made", "inner", "table", "relative"),
    [
        (
            llama,
            write_inner("past_key_values", ", positioned=True", ", relative=True"),
            "model.embed_tokens",
            True,
        ),
        (
            gpt2,
            write_inner("past_key_values", ", positioned=True", ", relative=False"),
            "transformer.wte",
            False,
        ),
        (mamba2, write_inner("cache_params"), "backbone.embeddings", None),
    ],
    ids=["llama", "gpt2", "mamba2"],
)
@torch.no_grad()
def test_a_language_model_decodes(
    made: Callable[[], nn.Module], inner: str, table: str, relative: bool | None
):
    torch.manual_seed(0)
    target = made()
    found = adapt(target)
    assert found.recipe == f"DecodingTokens({inner}, vocab_size=32, table='module.{table}')"
    assert found.d_model == 16 + BITS
    module: Any = found.module.double()
    assert getattr(module, "relative", None) is relative
    assert module.paddings == ("left",)
    # Mamba2 computes in fp32 within.
    within = 1e-5 if made is mamba2 else 1e-13
    x = draw((2, 7, 16 + BITS), 0)
    x[..., :-BITS] = 0  # which would move the embeddings
    y = module(x)
    ids = to_token_ids(x, 32)
    assert difference(y, target.double()(input_ids=ids).logits) < within
    state, steps = module.start(2), []
    for i in range(7):
        one, state = module.step(x[:, i], state)
        steps.append(one)
    assert difference(torch.stack(steps, 1), y) < within
    head, state = module.prefill(x[:, :4])
    before = [tensor.clone() for tensor in state.tensors]
    assert len(before) == 4
    for _ in range(2):
        tail, end = module.prefill(x[:, 4:], state)
        assert difference(torch.cat([head, tail], 1), y) < within
        assert end.position.tolist() == [7, 7]
    assert all(torch.equal(*pair) for pair in zip(state.tensors, before, strict=True))
    # Padding on the left, of the second row alone, and a step after it.
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[1, :3] = False
    padded, state = module.prefill(x, None, keep)
    assert state.position.tolist() == [7, 4]
    after, _ = module.step(x[:, 0], state)
    again = module(torch.cat([x[1:, 3:], x[1:, :1]], 1))
    assert difference(padded[1:, 3:], again[:, :4]) < within
    assert difference(after[1:], again[:, 4]) < within


@torch.no_grad()
def test_a_later_start_is_a_later_position():
    module: Any = adapt(gpt2()).module.double()
    x = draw((2, 5, 16 + BITS), 0)
    x[..., :-BITS] = 0
    later, state = module.prefill(x, module.start(2, 9))
    assert state.position.tolist() == [14, 14]
    ids, positions = to_token_ids(x, 32), torch.arange(9, 14).expand(2, 5)
    asked = module.module.module(input_ids=ids, position_ids=positions).logits
    assert difference(later, asked) < 1e-13
    assert difference(later, module(x)) > 1e-3
    with pytest.raises(ValueError, match="position=9 must be 0"):
        adapt(mamba2()).module.start(2, 9)  # type: ignore[reportCallIssue]


def test_gradients_are_those_of_inputs_embeds():
    target = llama()
    module = adapt(target).module.double()
    target = target.double()
    x = draw((2, 5, 16 + BITS), 0).requires_grad_()
    against = draw((2, 5, 32), 1)
    (found,) = torch.autograd.grad(module(x), x, against)
    embeddings: Any = target.get_submodule("model.embed_tokens")
    scale = embeddings.weight.detach().square().mean().sqrt()
    embedded = embeddings(to_token_ids(x.detach(), 32)) + scale * x[..., :-BITS]
    embedded = embedded.detach().requires_grad_()
    (asked,) = torch.autograd.grad(target(inputs_embeds=embedded).logits, embedded, against)
    assert difference(found[..., :-BITS], scale * asked) < 1e-7  # the scale was taken in fp32


@pytest.mark.parametrize(
    ("rotations", "relative"),
    [
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, True),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, False),
    ],
)
def test_rotations_that_change_with_the_length_are_not_relative(rotations: dict, relative: bool):
    module: Any = adapt(llama(rope_parameters=rotations)).module
    assert module.relative is relative


@torch.no_grad()
def test_what_is_no_language_model():
    target: Any = llama()
    backbone = adapt(target.model)
    inner = write_inner(
        "past_key_values", ", positioned=True", ", relative=True", "last_hidden_state"
    )
    assert backbone.recipe == (
        f"DecodingTokens({inner}, vocab_size=32, table='module.embed_tokens')"
    )
    x = draw((2, 7, 16 + BITS), 0).float()
    x[..., :-BITS] = 0
    ids = to_token_ids(x, 32)
    embedded = target.model.embed_tokens(ids)
    layers = [adapt(layer) for layer in target.model.layers]
    assert [found.recipe for found in layers] == ["HuggingFaceLayer(module, rotated=True)"] * 2
    for found in layers:
        embedded = found.module(embedded)
    assert difference(target.model.norm(embedded), backbone.module(x)) < 1e-5
    attention = adapt(target.model.layers[0].self_attn)
    assert attention.recipe == "HuggingFaceLayer(module, rotated=True, output=0)"
    of = load("transformers.models.bert")
    sizes = {"intermediate_size": 32, "num_attention_heads": 4}
    reader = adapt(of.BertModel(of.BertConfig(**SMALL, **sizes)))
    assert reader.recipe.startswith(
        "Tokens(Adapter(module, calls=call_model, given='input_ids', output='last_hidden_state')"
    )
    assert reader.notes[-1] == "the padding token 0 is left out of inputs"
