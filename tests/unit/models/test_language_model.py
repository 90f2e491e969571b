"""A whole model decoded: what it says token by token is what it says at once."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from lab.models import Block, LanguageModel, build
from lab.ops.cross_entropy import linear_cross_entropy

VOCAB, T = 40, 23


@pytest.fixture(params=["cheems", "jamba", "AM SE IM NE"])
def model(request) -> LanguageModel:
    """A small model in fp64, moved off the values it starts with."""
    small = {"S.d_state": 8, "S.chunk_len": 4, "E.n_experts": 16}
    letters = "S" if request.param == "jamba" else "SE"
    options = {key: value for key, value in small.items() if key[0] in letters}
    built = build(request.param, vocab_size=VOCAB, d_model=16, n_heads=2, options=options)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    return built.double().eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (3, T), generator=torch.Generator().manual_seed(2))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-10 * float(b.abs().max()))


@torch.no_grad()
def test_tokens_one_by_one_give_the_logits_of_all_at_once(model, tokens):
    state, stepped = model.start(3), []
    for token in tokens.T:
        logits, state = model.step(token, state)
        stepped.append(logits)
    assert close(torch.stack(stepped, 1), model(tokens))
    assert state.position.tolist() == [T] * 3


@torch.no_grad()
def test_a_prefix_and_the_rest_give_the_logits_of_the_whole(model, tokens):
    cut = 8
    before, state = model.prefill(tokens[:, :cut])
    after, _ = model.prefill(tokens[:, cut:], state)
    again, _ = model.prefill(tokens[:, cut:], state)
    assert close(torch.cat([before, after], 1), model(tokens))
    assert torch.equal(after, again), "going on from a state must not change it"


@torch.no_grad()
def test_padding_on_the_left_changes_nothing(model, tokens):
    lengths = (T, T - 5, 1)
    padded, keep = torch.zeros_like(tokens), torch.zeros(3, T, dtype=torch.bool)
    for row, length in enumerate(lengths):
        padded[row, T - length :], keep[row, T - length :] = tokens[row, :length], True
    together, state = model.prefill(padded, None, keep)
    assert together.isfinite().all()
    assert state.position.tolist() == list(lengths)
    for row, length in enumerate(lengths):
        alone = model(tokens[row : row + 1, :length])[0]
        assert close(together[row, T - length :], alone)


@torch.no_grad()
def test_generate_goes_on_with_the_likeliest_token(model, tokens):
    grown = model.generate(tokens[:, :5], 4)
    assert torch.equal(grown[:, :5], tokens[:, :5])
    for t in range(5, 9):
        assert torch.equal(grown[:, t], model(grown[:, :t])[:, -1].argmax(-1))
    assert torch.equal(model.generate(tokens[:, :5], 0), tokens[:, :5])


def test_draws_depend_on_the_seed_alone_and_stay_among_the_top(tokens):
    model = build("AM", vocab_size=VOCAB, d_model=16)
    first, same, other = (model.generate(tokens, 30, temperature=2.0, seed=s) for s in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    narrow = model.generate(tokens, 30, temperature=2.0, top_k=1)
    assert torch.equal(narrow, model.generate(tokens, 30))


def test_of_equal_tokens_as_many_are_drawn_from_as_asked_for():
    model = build("AM", vocab_size=VOCAB, d_model=16)
    model.embed.weight.data[:] = model.embed.weight.data[0].clone()
    prompt = torch.zeros(64, 1, dtype=torch.long)
    drawn = model.generate(prompt, 20, temperature=1e-38, top_k=2)[:, 1:]
    assert len(drawn.unique()) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n_tokens": -1}, "n_tokens=-1"),
        ({"n_tokens": 1, "temperature": -0.5}, "temperature=-0.5"),
        ({"n_tokens": 1, "top_k": 0}, "top_k=0"),
        ({"n_tokens": 1, "top_k": VOCAB + 1}, f"1 … {VOCAB}"),
        ({"n_tokens": 1, "keep": torch.tensor([[True, False]])}, "on the left alone"),
        ({"n_tokens": 1, "keep": torch.tensor([[True, True, True]])}, "keep is"),
    ],
)
def test_generate_refuses(unchecked, arguments, words):
    model = build("AM", vocab_size=VOCAB, d_model=16)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        model.generate(torch.zeros(1, 2, dtype=torch.long), **arguments)


def test_a_state_of_another_batch_is_refused(unchecked, tokens):
    model = build("AM", vocab_size=VOCAB, d_model=16)
    state = model.start(2)
    with pytest.raises(ValueError, match="state has batch 2, must be x's 3"):
        model.prefill(tokens, state)
    with pytest.raises(ValueError, match="state has batch 2, must be x's 3"):
        model.step(tokens[:, 0], state)


def test_a_state_of_another_model_is_refused(unchecked, tokens):
    model = build("SM AM", vocab_size=VOCAB, d_model=16)
    for stack, words in (("AM AM", "must be SSDState"), ("SM", "state has 1 blocks, must be 2")):
        state = build(stack, vocab_size=VOCAB, d_model=16).start(3)
        with pytest.raises(ValueError, match=words):
            model.prefill(tokens, state)
    state = build("SM NM", vocab_size=VOCAB, d_model=16).start(3)
    with pytest.raises(ValueError, match="of another model"):
        model.step(tokens[:, 0], state)


def test_a_mixer_without_a_state_is_named():
    model = LanguageModel([Block(8, nn.Identity(), None)], vocab_size=VOCAB, d_model=8)
    with pytest.raises(ValueError, match="Identity cannot decode"):
        model.generate(torch.zeros(1, 2, dtype=torch.long), 1)
    assert model(torch.zeros(1, 2, dtype=torch.long)).shape == (1, 2, VOCAB)


@pytest.mark.parametrize(
    ("tokens", "got"),
    [
        (torch.zeros(4, dtype=torch.long), r"int64 \[4\]"),
        (torch.zeros(1, 2, 3, dtype=torch.long), r"int64 \[1, 2, 3\]"),
        (torch.zeros(1, 4), r"float32 \[1, 4\]"),
        ([[1, 2]], "a list"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_batch_of_tokens_is_named(tokens, got):
    model = build("AM", vocab_size=32, d_model=16)
    with pytest.raises(ValueError, match=f"tokens: must be .*, got {got}"):
        model(tokens)


STACKS = {
    "AM window": {"A.mask": "value", "A.window": 3},
    "IM soft": {"I.mask": "soft"},
    "SM conv": {"S.position": "conv"},
    "SM decay": {"S.position": "decay"},
    "NE gather": {"E.backend": "gather"},
    "NP dense": {"P.backend": "dense"},
    "NR": {},
    "NX": {},
}


@pytest.fixture(params=STACKS)
def stacked(request) -> LanguageModel:
    """A model of one block in fp64, moved off the values it starts with."""
    torch.manual_seed(0)
    stack, options = request.param.split()[0], STACKS[request.param]
    built = build(stack, vocab_size=VOCAB, d_model=16, options=options).double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    return built


def test_a_hessian_vector_product_is_the_difference_of_gradients(stacked, tokens):
    weights = list(stacked.parameters())
    ways = [torch.randn_like(p) for p in weights]

    def differentiate(**options) -> list[torch.Tensor]:
        hidden = stacked.forward_embeddings(stacked.embed(tokens)).flatten(0, 1)
        loss, _ = linear_cross_entropy(hidden, stacked.head.weight, tokens.roll(1).flatten())
        return list(torch.autograd.grad(loss, weights, materialize_grads=True, **options))

    def differentiate_at(step: float) -> torch.Tensor:
        for p, way in zip(weights, ways, strict=True):
            p.data.add_(way, alpha=step)
        grads = differentiate()
        for p, way in zip(weights, ways, strict=True):
            p.data.sub_(way, alpha=step)
        return torch.cat([g.flatten() for g in grads])

    grads = differentiate(create_graph=True)
    product = torch.autograd.grad(grads, weights, ways, materialize_grads=True)
    difference = (differentiate_at(1e-5) - differentiate_at(-1e-5)) / 2e-5
    error = torch.cat([p.flatten() for p in product]) - difference
    assert error.norm() < 1e-7 * difference.norm()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_functions_agree_with_autograd(stacked, tokens):
    stacked.eval()
    weights = {name: p.detach() for name, p in stacked.named_parameters()}

    def lose(weights, row):
        return functional_call(stacked, weights, (row[None],)).square().mean()

    each = vmap(grad(lose), in_dims=(None, 0))(weights, tokens)
    slope = jvp(lambda weights: lose(weights, tokens[0]), (weights,), (weights,))[1]
    loss = stacked(tokens[:1]).square().mean()
    expected = torch.autograd.grad(loss, list(stacked.parameters()), materialize_grads=True)
    for name, one in zip(weights, expected, strict=True):
        torch.testing.assert_close(each[name][0], one, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        slope, sum((one * w).sum() for one, w in zip(expected, weights.values(), strict=True))
    )


def test_a_model_is_exported_but_not_traced(tokens):
    options = {"A.mask": "value", "A.window": 3, "S.position": "conv"}
    model = build("SR AE IP", vocab_size=VOCAB, d_model=16, options=options).double().eval()
    model.requires_grad_(False)
    program = torch.export.export(model, (tokens,)).module()
    assert close(program(tokens.flip(0)), model(tokens.flip(0)))
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace cannot .* use torch\.export"):
        torch.jit.trace(model, (tokens,))
