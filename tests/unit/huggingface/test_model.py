"""The lab's models as Hugging Face models: the same logits, generation, loss and gradients."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from lab.huggingface import LabConfig, LabForCausalLM
from lab.huggingface.model import CACHE
from lab.layers.routed import collect_balance_losses
from lab.models import ARCHITECTURES
from lab.models.evaluation import score
from lab.ops.cross_entropy import linear_cross_entropy
from tasks.mqar import MQAR

STACKS = [*ARCHITECTURES, "AM SM IE", "SP NE AR"]


HALVES = torch.tensor([[0] * 4 + [1] * 5])


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
        ({"input_ids": draw_tokens(), "position_ids": draw_tokens()}, "must count from 0 in each"),
        ({"input_ids": draw_tokens(), "position_ids": torch.arange(5, 14)[None]}, "begins at 5"),
        ({"input_ids": draw_tokens(), "seq_idx": torch.zeros(3, 8)}, r"seq_idx is \[3, 8\], must"),
        ({"input_ids": draw_tokens(1), "cu_seqlens": torch.tensor([0, 4, 8])}, "rise from 0 to 9"),
        ({"input_ids": draw_tokens(), "cu_seqlens": torch.tensor([0, 9])}, "one row of tokens"),
        (
            {"input_ids": draw_tokens(1), "seq_idx": HALVES, "cu_seqlens": torch.tensor([0, 9])},
            "seq_idx and cu_seqlens name different",
        ),
        ({"input_ids": draw_tokens(1), "seq_idx": HALVES, "use_cache": True}, "leave no state"),
        ({"input_ids": draw_tokens(), "output_router_logits": True}, "no routed experts"),
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


@pytest.mark.parametrize("kind", ["position_ids", "seq_idx", "cu_seq_lens_q", "cu_seqlens"])
def test_documents_of_a_packed_row_do_not_mix(model, kind):
    tokens = draw_tokens(1, 11)
    parts = (4, 1, 6)
    given = {
        "position_ids": torch.cat([torch.arange(n) for n in parts])[None],
        "seq_idx": torch.arange(3).repeat_interleave(torch.tensor(parts))[None],
        "cu_seq_lens_q": torch.tensor([0, 4, 5, 11]),
        "cu_seqlens": torch.tensor([0, 4, 5, 11], dtype=torch.int32),
    }
    found = model(tokens, output_hidden_states=True, **{kind: given[kind]})
    alone = [model(part, output_hidden_states=True) for part in tokens.split(parts, 1)]
    torch.testing.assert_close(found.logits, torch.cat([part.logits for part in alone], 1))
    for layer, stream in enumerate(found.hidden_states):
        asked = torch.cat([part.hidden_states[layer] for part in alone], 1)
        torch.testing.assert_close(stream, asked)


def test_packed_rows_with_padding_give_the_loss_of_their_documents():
    model, tokens = build_model("SM AR"), draw_tokens(2, 9)
    mask = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3, 0, 0]])
    labels = tokens.where(mask.bool(), -100)
    found = model(
        tokens, attention_mask=mask, position_ids=positions, labels=labels,
        output_router_logits=True,
    )  # fmt: skip
    documents = [tokens[:1, :4], tokens[:1, 4:], tokens[1:, :3], tokens[1:, 3:7]]
    total = sum(model(part, labels=part).loss * (part.shape[1] - 1) for part in documents)
    text_loss = found.loss.double() - found.aux_loss
    assert isinstance(total, torch.Tensor)
    torch.testing.assert_close(text_loss, total.double() / (3 + 4 + 2 + 3), rtol=1e-6, atol=0)
    alone = [model(part, output_router_logits=True).router_logits[0] for part in documents]
    kept = found.router_logits[0].view(2, 9, -1)[mask.bool()]
    torch.testing.assert_close(kept, torch.cat(alone))
    found.loss.backward()
    grad = model.model.embed.weight.grad
    assert grad is not None
    assert grad.isfinite().all()


def test_positions_that_count_the_tokens_read_change_nothing(model):
    tokens, mask = draw_tokens(), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    plain = model(tokens, attention_mask=mask, use_cache=True)
    given = model(tokens, attention_mask=mask, position_ids=positions, use_cache=True)
    assert torch.equal(plain.logits, given.logits)
    more, mask = tokens[:, :1], torch.cat([mask, mask[:, -1:]], 1)
    after = torch.tensor([[9], [5], [9]])
    given = model(more, attention_mask=mask, position_ids=after, cache=given[CACHE])
    assert torch.equal(model(more, attention_mask=mask, cache=plain[CACHE]).logits, given.logits)


def test_the_balance_loss_is_the_layers_and_joins_the_loss():
    model, tokens = build_model("jamba"), draw_tokens()
    with collect_balance_losses(model.model) as losses:
        model.model(tokens)
    found = model(tokens, labels=tokens, output_router_logits=True)
    torch.testing.assert_close(found.aux_loss, sum(losses))
    torch.testing.assert_close(found.loss, model(tokens, labels=tokens).loss + found.aux_loss)
    found.loss.backward()
    routers = [p.grad for name, p in model.named_parameters() if name.endswith("router.weight")]
    assert len(found.router_logits) == len(routers) == len(losses)
    # The loss's mean over tokens of the same rows: the mask takes padding out.
    row = model(tokens[:1], output_router_logits=True)
    padded = torch.cat([tokens[1:2, :3], tokens[:1]], 1)
    mask = torch.tensor([[0] * 3 + [1] * 9])
    given = model(padded, attention_mask=mask, output_router_logits=True)
    torch.testing.assert_close(given.aux_loss, row.aux_loss)


@pytest.mark.parametrize("stack", ["cheems", "SM AR"])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_with_checkpointing_are_those_without(stack, padded):
    model, tokens = build_model(stack), draw_tokens()
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    options = {"attention_mask": mask} if padded else {}
    options |= {"output_router_logits": True} if stack == "SM AR" else {}
    model(tokens, labels=tokens, **options).loss.backward()
    asked = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))
    runs = []
    model.model.blocks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    model(tokens, labels=tokens, **options).loss.backward()
    assert padded or len(runs) == 2  # once more in the backward pass
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, asked[name])


def test_logits_of_chosen_positions(model):
    tokens, chosen = draw_tokens(), torch.tensor([1, 4, 8])
    asked = model(tokens).logits[:, chosen]
    assert torch.equal(model(tokens, logits_to_keep=chosen).logits, asked)


def test_targets_of_a_task_are_labels_that_are_shifted_already():
    task = MQAR(seq_len=16, vocab_size=32)
    batch, model = task.batch(size=3), build_model("AM")
    found = model(batch.inputs, shift_labels=batch.targets).loss
    asked = linear_cross_entropy(*score(model.model, batch, "fp32"))[0]
    torch.testing.assert_close(found.double(), asked, rtol=1e-6, atol=0)
