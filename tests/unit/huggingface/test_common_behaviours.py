"""What transformers' own tests ask of every model and of `generate`, asked of the lab's models.

Its mixins are not in the package, so the main ones are written anew: one function for each
behaviour, run on three stacks. What a model does not do is in the table, too, with the reason.
"""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from lab.huggingface import LabConfig, LabForCausalLM
from lab.huggingface.model import CACHE

STACKS = ("AM*2", "SM*2", "SE*7 IE")
TOKENS = torch.randint(1, 48, (3, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(TOKENS)
PADDED = MASK.clone()
PADDED[1, :4] = 0
GENERATION = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}


def make(stack: str, **options) -> LabForCausalLM:
    torch.manual_seed(0)
    config = LabConfig(stack=stack, vocab_size=48, d_model=16, num_attention_heads=2, **options)
    return LabForCausalLM(config).double().eval()


def load(folder, **options) -> LabForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)
    assert isinstance(model, LabForCausalLM)
    return model.eval()


def saves_and_loads(model, folder):
    model.save_pretrained(folder)
    found, asked = load(folder)(TOKENS).logits, model(TOKENS).logits
    torch.testing.assert_close(found, asked, rtol=0, atol=1e-12)
    assert LabConfig.from_dict({"n_heads": 2}).num_attention_heads == 2
    assert load(folder).config.to_dict() == {**model.config.to_dict(), "_name_or_path": str(folder)}


def loads_in_another_precision(model, folder):
    model.save_pretrained(folder)
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert (half(TOKENS).logits - model(TOKENS).logits).abs().max() < 0.05


def draws_weights_that_a_folder_lacks(model, folder):
    """As `build` draws them; the others are those of the folder."""
    weights = model.state_dict()
    lost = next(name for name in weights if name.endswith("mlp.up.weight") or "mixer" in name)
    model.save_pretrained(folder, state_dict={k: v for k, v in weights.items() if k != lost})
    loaded = load(folder).state_dict()
    assert 0 < loaded[lost].std() < 1
    assert all(torch.equal(loaded[name], weights[name]) for name in weights if name != lost)


def copies_and_pickles(model, folder):
    expected = model(TOKENS).logits
    assert torch.equal(copy.deepcopy(model)(TOKENS).logits, expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(TOKENS).logits, expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))


def ties_weights(model, folder):
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.save_pretrained(folder)
    loaded = load(folder)
    assert loaded.model.head.weight is loaded.model.embed.weight


def takes_another_table(model, folder):
    table = nn.Embedding(48, 16, dtype=torch.float64)
    model.set_input_embeddings(table)
    assert model.get_input_embeddings() is table
    embedded = model(inputs_embeds=table(TOKENS)).logits
    assert torch.equal(model(TOKENS).logits, embedded)


def grows_and_shrinks_its_vocabulary(model, folder):
    with torch.no_grad():
        before = model(TOKENS).logits
    model.resize_token_embeddings(60, mean_resizing=False)
    assert model.model.embed.weight[48:].std() < 0.03
    assert torch.equal(model(TOKENS).logits[..., :48], before)
    model(torch.full((1, 3), 59), labels=torch.full((1, 3), 59)).loss.backward()
    model.save_pretrained(folder)
    assert load(folder)(TOKENS).logits.shape == (3, 9, 60)
    model.resize_token_embeddings(20)
    assert model(TOKENS % 20).logits.shape == (3, 9, 20)
    assert model.model.head.weight is model.model.embed.weight


def repeats_itself(model, folder):
    assert torch.equal(model(TOKENS).logits, model(TOKENS).logits)


def reads_rows_apart(model, folder):
    alone = torch.cat([model(row[None]).logits for row in TOKENS])
    torch.testing.assert_close(model(TOKENS).logits, alone)


def returns_tuples_too(model, folder):
    options = {"labels": TOKENS, "output_hidden_states": True, "use_cache": True}
    named, plain = model(TOKENS, **options), model(TOKENS, **options, return_dict=False)
    assert [type(part) for part in plain] == [type(part) for part in named.to_tuple()]
    assert torch.equal(plain[0], named.loss)
    assert torch.equal(plain[1], named.logits)
    assert all(map(torch.equal, plain[-1], named.hidden_states))


def gives_gradients_to_hidden_states(model, folder):
    found = model(TOKENS, output_hidden_states=True)
    for stream in found.hidden_states:
        stream.retain_grad()
    found.logits[..., 0].sum().backward()
    assert len(found.hidden_states) == model.config.num_hidden_layers + 1
    assert all(stream.grad is not None for stream in found.hidden_states)


def reads_embeddings(model, folder):
    embedded = model.get_input_embeddings()(TOKENS)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(TOKENS).logits)
    asked = model.generate(TOKENS, **GENERATION)[:, 9:]
    assert torch.equal(model.generate(inputs_embeds=embedded, **GENERATION), asked)


def leaves_padding_out(model, folder):
    alone = model(TOKENS[1:2, 4:]).logits[0]
    torch.testing.assert_close(model(TOKENS, attention_mask=PADDED).logits[1, 4:], alone)
    right = MASK.clone()
    right[1, 5:] = 0
    found = model(TOKENS, attention_mask=right).logits[1, :5]
    torch.testing.assert_close(found, model(TOKENS[1:2, :5]).logits[0])
    grown = model.generate(TOKENS, attention_mask=PADDED, **GENERATION)[1, 9:]
    assert torch.equal(grown, model.generate(TOKENS[1:2, 4:], **GENERATION)[0, 5:])


def learns(model, folder):
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        loss = model(TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert not [name for name, p in model.named_parameters() if p.grad is None]


def checkpoints_gradients(model, folder):
    model.train()
    model(TOKENS, labels=TOKENS).loss.backward()
    asked = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert model.is_activation_checkpointing
    model(TOKENS, labels=TOKENS).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, asked[name])
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing


def generates_with_a_cache_as_without(model, folder):
    for options in (
        {"num_beams": 1},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "top_k": 10, "temperature": 0.7},
        {"do_sample": True, "num_beams": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ):
        grown = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            given = {"attention_mask": PADDED, "use_cache": use_cache}
            grown.append(model.generate(TOKENS, **{**GENERATION, **options, **given}))
        assert torch.equal(*grown), options


def ends_at_the_end_token(model, folder):
    whole = model.generate(TOKENS[:1], **GENERATION)
    ended = model.generate(TOKENS[:1], **GENERATION, eos_token_id=int(whole[0, 10]))
    assert ended.shape[1] == (10 if whole[0, 9] == whole[0, 10] else 11)


def says_what_it_generated(model, folder):
    options = {"return_dict_in_generate": True, "output_scores": True}
    found = model.generate(TOKENS, **GENERATION, **options, output_hidden_states=True)
    assert len(found.scores) == 4
    assert found.scores[0].shape == (3, 48)
    assert [step[0].shape[1] for step in found.hidden_states] == [9, 1, 1, 1]


def goes_on_from_a_cache(model, folder):
    options = {"return_dict_in_generate": True}
    whole = model.generate(TOKENS, **{**GENERATION, "max_new_tokens": 6})
    first = model.generate(TOKENS, **GENERATION, **options)
    rest = {"max_new_tokens": 2, "attention_mask": torch.ones(3, 13, dtype=torch.long)}
    found = model.generate(
        first.sequences, past_key_values=first.past_key_values, **{**GENERATION, **rest}
    )
    assert torch.equal(found, whole)


def refuses_another_models_cache(model, folder):
    """Prefix tuning gives keys and values, which not every mixer has."""
    with pytest.raises(ValueError, match=f"{CACHE}: must be a cache that this model returned"):
        model(TOKENS, past_key_values=DynamicCache())


def refuses_attentions(model, folder):
    """Not every mixer has them: `run_with_cache` gives the patterns of those that do."""
    with pytest.raises(ValueError, match="run_with_cache"):
        model(TOKENS, output_attentions=True)


def is_not_traced(model, folder):
    """By torch.jit.trace, which torch has given up; `torch.export` works on a model's stack."""
    with pytest.raises(Exception):  # noqa: B017, PT011
        torch.jit.trace(lambda tokens: model(tokens, return_dict=False)[0], TOKENS)


BEHAVIOURS: tuple[Callable, ...] = (
    saves_and_loads,
    loads_in_another_precision,
    draws_weights_that_a_folder_lacks,
    copies_and_pickles,
    ties_weights,
    takes_another_table,
    grows_and_shrinks_its_vocabulary,
    repeats_itself,
    reads_rows_apart,
    returns_tuples_too,
    gives_gradients_to_hidden_states,
    reads_embeddings,
    leaves_padding_out,
    learns,
    checkpoints_gradients,
    generates_with_a_cache_as_without,
    ends_at_the_end_token,
    says_what_it_generated,
    goes_on_from_a_cache,
    refuses_another_models_cache,
    refuses_attentions,
    is_not_traced,
)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_a_model_of_the_lab(behaviour: Callable, stack: str, tmp_path):
    behaviour(make(stack), tmp_path)
