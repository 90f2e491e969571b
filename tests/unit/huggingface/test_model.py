"""The lab's models as Hugging Face models: the same logits, generation, loss and gradients."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from lab.huggingface import LabConfig, LabForCausalLM
from lab.models import ARCHITECTURES

STACKS = [*ARCHITECTURES, "AM SM IE", "SP NE AR"]


def build_model(stack: str, **options) -> LabForCausalLM:
    torch.manual_seed(0)
    return LabForCausalLM(LabConfig(stack=stack, vocab_size=32, d_model=8, **options)).double()


def draw_tokens(rows: int = 3, length: int = 9) -> torch.Tensor:
    return torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=STACKS)
def model(request) -> LabForCausalLM:
    return build_model(request.param).eval()


def test_logits_and_hidden_states_are_the_models_own(model):
    tokens = draw_tokens()
    given = model(tokens, output_hidden_states=True)
    assert torch.equal(given.logits, model.model(tokens))
    assert torch.equal(given.hidden_states[0], model.model.embed(tokens))
    assert torch.equal(given.hidden_states[-1], model.model.hidden(tokens))
    assert len(given.hidden_states) == len(model.model.blocks) + 1
    assert torch.equal(model(tokens, logits_to_keep=2).logits, given.logits[:, -2:])
    by_embeddings = model(inputs_embeds=model.get_input_embeddings()(tokens))
    assert torch.equal(by_embeddings.logits, given.logits)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_a_cache_is_generation_without_one(model, beams):
    tokens, mask = draw_tokens(), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    options = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    cached = model.generate(tokens, attention_mask=mask, **options)
    whole = model.generate(tokens, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(cached.sequences, whole.sequences)
    for found, asked in zip(cached.logits, whole.logits, strict=True):
        assert torch.allclose(found, asked, atol=1e-5)  # transformers keeps them in fp32
    if beams == 1:
        assert torch.equal(cached.sequences, model.model.generate(tokens, 5, keep=mask.bool()))


def test_generation_reads_each_token_once(model):
    lengths = []
    read = model.get_input_embeddings()
    read.register_forward_pre_hook(lambda embed, args: lengths.append(args[0].shape[1]))
    model.generate(draw_tokens(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert lengths == [9, 1, 1, 1, 1]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_call_goes_on_from_the_cache_of_another(model, name):
    tokens = draw_tokens()
    whole = model(tokens).logits
    first = model(tokens[:, :4], use_cache=True)
    rest = model(tokens[:, 4:], **{name: first.past_key_values}, use_cache=True)
    assert rest.past_key_values.get_seq_length() == 9
    assert torch.allclose(torch.cat([first.logits, rest.logits], 1), whole, atol=1e-10)


def test_labels_are_shifted_and_their_loss_has_the_gradient():
    model, tokens = build_model("SM AM"), draw_tokens()
    model(tokens, labels=tokens).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = model.model(tokens)[:, :-1]
    # transformers computes the loss in fp32.
    cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        assert p.grad is not None
        assert torch.allclose(found[name], p.grad, atol=1e-6), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_loaded_by_the_auto_classes(tmp_path, tied):
    model = build_model("cheems", tie_word_embeddings=tied, layer_options={"S.d_state": 4}).eval()
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LabConfig)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, entry in model.state_dict().items():
        assert torch.equal(entry, loaded.state_dict()[name]), name
    tokens = draw_tokens()
    assert torch.allclose(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=1e-12)
    assert (loaded.model.head.weight is loaded.model.embed.weight) is tied


def test_a_new_model_has_the_labs_initial_weights():
    config = LabConfig(stack="AM", vocab_size=512, d_model=32, embedding_std=0.5)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    assert model.model.embed.weight.std().item() == pytest.approx(0.5, rel=0.02)
    torch.manual_seed(4)
    other = AutoModelForCausalLM.from_config(config)
    assert not torch.equal(model.model.embed.weight, other.model.embed.weight)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": draw_tokens(), "inputs_embeds": torch.zeros(3, 9, 8)}, "either input_ids"),
        ({"input_ids": draw_tokens(), "output_attentions": True}, "run_with_cache"),
        ({"input_ids": draw_tokens(), "position_ids": draw_tokens()}, "position_ids: is not an"),
        ({"input_ids": draw_tokens(), "nonsense": 3}, "nonsense: is not an argument"),
    ],
)
def test_calls_that_are_refused(call, said):
    with pytest.raises(ValueError, match=said):
        build_model("AM")(**call)


def test_a_configuration_that_cannot_be_built_is_refused():
    with pytest.raises(ValueError, match="stack"):
        LabForCausalLM(LabConfig(stack="QQ"))
    with pytest.raises(ValueError, match="model=MODULE:CLASS"):
        LabForCausalLM(LabConfig(stack="UM"))


def test_settings_of_the_configuration_are_kept():
    model, tokens = build_model("AM*2", output_hidden_states=True).eval(), draw_tokens()
    assert len(model(tokens).hidden_states) == 3
    assert model(tokens, output_hidden_states=False).hidden_states is None
    assert model.config.num_hidden_layers == 2
    assert isinstance(build_model("AM", return_dict=False)(tokens), tuple)
    with pytest.raises(ValueError, match="run_with_cache"):
        build_model("AM", output_attentions=True)(tokens)


@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_grows(tied):
    model, tokens = build_model("SM AM", tie_word_embeddings=tied).eval(), draw_tokens()
    before = model(tokens).logits
    model.resize_token_embeddings(40)
    after = model(torch.cat([tokens, torch.full((3, 1), 39)], 1)).logits
    assert after.shape == (3, 10, 40)
    torch.testing.assert_close(after[:, :9, :32], before)
    assert (model.model.head.weight is model.model.embed.weight) is tied
    assert model.config.vocab_size == 40


def test_an_untrained_model_guesses_nearly_evenly():
    torch.manual_seed(0)
    tokens = torch.randint(256, (2, 64))
    loss = LabForCausalLM(LabConfig(stack="AM*2", vocab_size=256))(tokens, labels=tokens).loss
    assert abs(loss.item() - math.log(256)) < 0.1
