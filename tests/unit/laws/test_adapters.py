"""Foreign modules are called as they want to be, and go on from a state where they can."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lab.laws import adapters
from lab.laws.adapters import Tokens, adapt, find_lengths_taken, to_token_ids
from lab.laws.adapters.tokens import BITS
from lab.laws.probes import draw
from lab.layers.state import Decoder
from lab.models import build


def relative_difference(found: Tensor, asked: Tensor) -> float:
    return float((found - asked).detach().abs().max() / asked.detach().abs().max())


class Model(nn.Module):
    """Tokens and a table of positions, a GRU, a head; the state comes beside the logits."""

    def __init__(self, vocab_size: int = 32):
        super().__init__()
        self.places = nn.Embedding(300, 8)
        self.embed = nn.Embedding(vocab_size, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.gru(x)[0])


class Going(nn.Module):
    """Returns its state beside its output, and writes into the one that it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor, cache: dict | None = None) -> tuple[Tensor, None, dict]:
        z = self.linear(x).cumsum(1)
        if cache is None:
            cache = {"sum": torch.zeros_like(z[:, 0])}
        y = z + cache["sum"][:, None]
        cache["sum"].copy_(y[:, -1])
        return y.tanh(), None, cache


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def init_state(self, batch: int) -> Tensor:
        return self.cell.weight_hh.new_zeros(batch, 8)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(x, state)
        return state, state

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(self.outputs(x, self.init_state(len(x))), 1)

    def outputs(self, x: Tensor, state: Tensor) -> list[Tensor]:
        outputs = []
        for one in x.unbind(1):
            y, state = self.step(one, state)
            outputs.append(y)
        return outputs


class TakesState(nn.Module):
    """Its state is required, and made by a method."""

    def __init__(self):
        super().__init__()
        self.inner = Cell()

    def zero_state(self, batch: int) -> Tensor:
        return self.inner.init_state(batch)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.inner.outputs(x, h)
        return torch.stack(outputs, 1), outputs[-1]


class Cached(nn.Module):
    """As mamba-ssm's are: a state for inference, filled by forward and written to by step."""

    def __init__(self, layer_idx: int | None):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.layer_idx = layer_idx

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None):
        return tuple(torch.zeros(batch_size, 8, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor, inference_params=None) -> Tensor:
        z = self.linear(x)
        if inference_params is not None:
            last, total = inference_params.key_value_memory_dict[self.layer_idx]
            last.copy_(z[:, -1])
            total.copy_(z.sum(1))
        return z.cumsum(1) + torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], 1)

    def step(self, x: Tensor, last: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.linear(x[:, 0])
        total.add_(z)
        y = total + last
        last.copy_(z)
        return y[:, None], last, total


DECODERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gru": (lambda: nn.GRU(8, 6, 2), "TorchRecurrent(module, layout='tbd')"),
    "lstm": (lambda: nn.LSTM(8, 6, batch_first=True), "TorchRecurrent(module)"),
    "returned": (Going, "Returned(module, name='cache', place=2)"),
    "stepping": (Cell, "Stepping(module, initial='init_state')"),
    "told": (TakesState, "Returned(module, name='h', initial='zero_state')"),
    "at once": (lambda: Cached(0), "Allocated(module)"),
    "by steps": (lambda: Cached(None), "Allocated(module)"),
    "tokens": (
        lambda: build("AM", vocab_size=32, d_model=8),
        "DecodingTokens(module, vocab_size=32, table='embed')",
    ),
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_goes_on_from_any_state_any_number_of_times(name: str):
    made, recipe = DECODERS[name]
    torch.manual_seed(0)
    found = adapt(made())
    assert found.recipe == recipe
    assert found.d_model == 8 + BITS * ("Tokens" in recipe)
    module = found.module.double().eval()
    assert isinstance(module, Decoder)
    x = draw((3, 9, found.d_model), 0)
    with torch.no_grad():
        y = module(x)
        state, steps = module.start(3), []
        for i in range(9):
            one, state = module.step(x[:, i], state)
            steps.append(one)
        assert relative_difference(torch.stack(steps, 1), y) < 1e-13
        assert state.position.tolist() == [9] * 3
        head, state = module.prefill(x[:, :4])
        before = copy.deepcopy(state)
        for _ in range(2):
            tail, end = module.prefill(x[:, 4:], state)
            assert relative_difference(torch.cat([head, tail], 1), y) < 1e-13
            assert end.position.tolist() == [9] * 3
    for mine, theirs in zip(leaves(state), leaves(before), strict=True):
        assert torch.equal(mine, theirs)


def leaves(state: object) -> list[Tensor]:
    return [x for x in tree_leaves(state) if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", ["gru", "stepping", "returned"])
def test_padding_is_refused_where_no_mask_is_taken(name: str):
    module: Any = adapt(DECODERS[name][0]()).module
    assert module.paddings == ()
    keep = torch.ones(2, 5, dtype=torch.bool)
    module.prefill(torch.zeros(2, 5, 8), None, keep)
    keep[0, 0] = False
    with pytest.raises(ValueError, match="keep has padding"):
        module.prefill(torch.zeros(2, 5, 8), None, keep)


@dataclass
class Output:
    loss: Tensor
    hidden: Tensor


class Returning(nn.Module):
    def __init__(self, form: Callable[[Tensor], object]):
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.form = form

    def forward(self, x: Tensor) -> object:
        return self.form(self.linear(x))


class Placed(nn.Module):
    """Looks its positions up; wants them for each row, or once."""

    def __init__(self, axes: int):
        super().__init__()
        self.table, self.axes = nn.Embedding(300, 8), axes

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        if input_pos.ndim != self.axes:
            raise ValueError("positions of other axes")
        return x + self.table(input_pos)


class Chunked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.unflatten(1, (-1, 16))).flatten(1, 2)


CALLED: dict[str, tuple[Callable[[], Any], str, Callable[[Any, Tensor], Tensor]]] = {
    "plain": (lambda: nn.Linear(8, 6), "module", lambda m, x: m(x)),
    "function": (lambda: nn.Linear(8, 6).forward, "PlainAdapter(module)", lambda m, x: m(x)),
    "tuple": (
        lambda: Returning(lambda y: (y.sum(), y)),
        "PlainAdapter(module, output=1)",
        lambda m, x: m.linear(x),
    ),
    "dict": (
        lambda: Returning(lambda y: {"n": 3, "y": y}),
        "PlainAdapter(module, output='y')",
        lambda m, x: m.linear(x),
    ),
    "dataclass": (
        lambda: Returning(lambda y: Output(y.sum(), y)),
        "PlainAdapter(module, output='hidden')",
        lambda m, x: m.linear(x),
    ),
    "heads": (
        lambda: Returning(lambda y: y.unflatten(-1, (2, 3))),
        "PlainAdapter(module)",
        lambda m, x: m.linear(x),
    ),
    "convolution": (
        lambda: nn.Conv1d(8, 6, 3, padding=1),
        "PlainAdapter(module, layout='bdt')",
        lambda m, x: m(x.mT).mT,
    ),
    "width of a length": (
        lambda: nn.Conv1d(8, 6, 1, padding=0),
        "PlainAdapter(module, layout='bdt')",
        lambda m, x: m(x.mT).mT,
    ),
    "both ways": (
        lambda: nn.GRU(8, 6, bidirectional=True),
        "PlainAdapter(module, output=0, layout='tbd')",
        lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1),
    ),
    "positions": (
        lambda: Placed(1),
        "Positioned(module, name='input_pos')",
        lambda m, x: m(x, torch.arange(16)),
    ),
    "positions of rows": (
        lambda: Placed(2),
        "Positioned(module, name='input_pos', batched=True)",
        lambda m, x: m(x, torch.arange(16).expand(3, 16)),
    ),
    "chunks": (Chunked, "module", lambda m, x: m(x)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2),
        "Masked(module, output=0, layout='tbd')",
        lambda m, x: attend(m, x),
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        "Masked(module)",
        lambda m, x: m(x, nn.Transformer.generate_square_subsequent_mask(16)),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False
        ),
        "Masked(module, layout='tbd')",
        lambda m, x: m(
            x.transpose(0, 1), nn.Transformer.generate_square_subsequent_mask(16)
        ).transpose(0, 1),
    ),
    "tokens": (
        Model,
        "Tokens(module, vocab_size=32, table='embed')",
        lambda m, x: m(to_token_ids(x, 32)),
    ),
    "table alone": (
        lambda: nn.Embedding(32, 8),
        "Tokens(module, vocab_size=32, table='')",
        lambda m, x: m(to_token_ids(x, 32)),
    ),
}


def attend(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    x = x.transpose(0, 1)
    return module(x, x, x, attn_mask=mask)[0].transpose(0, 1)


@pytest.mark.parametrize("name", CALLED)
def test_a_module_is_called_as_it_wants_to_be(name: str):
    made, recipe, called = CALLED[name]
    target = made()
    if isinstance(target, nn.Module):
        target.eval()
    found = adapt(target)
    assert found.recipe == recipe
    assert found.d_model == 8 + BITS * ("Tokens" in recipe)
    assert not isinstance(found.module, Decoder)
    x = draw((3, 16, found.d_model), 0).float()
    if "Tokens" in recipe:
        x[..., :-BITS] = 0  # which would move the embeddings
    with torch.no_grad():
        y, asked = found.module(x), called(target, x)
    assert y.shape[:2] == (3, 16)
    assert relative_difference(y, asked.reshape(y.shape)) < 1e-6


def test_what_was_found_is_said():
    assert adapt(nn.Conv1d(8, 6, 3, padding=1)).notes == (
        "width 8, found by probing",
        "features before time ([b d t])",
    )
    assert adapt(nn.GRU(8, 6), d_model=8).notes == (
        "batch second ([t b d]), as its batch_first is False",
        "returns a tuple: item 0 is taken",
        "decodes by its hidden state",
    )
    assert adapt(Model(400)).recipe == "Tokens(module, vocab_size=400, table='embed')"
    assert adapt(Model()).notes == ("tokens of 32, embedded at embed",)


def test_options_decide():
    pair = Returning(lambda y: (y, -y))
    x = draw((2, 5, 8), 0).float()
    assert torch.equal(adapt(pair, output=1).module(x), -pair.linear(x))
    assert adapt(nn.GRU(8, 8), layout="btd").recipe == "TorchRecurrent(module)"
    assert adapt(nn.GRU(8, 8), relative=False).recipe == (
        "TorchRecurrent(module, relative=False, layout='tbd')"
    )
    assert adapt(torch.tanh, d_model=5).d_model == 5
    assert adapt(lambda ids: ids[..., None].double(), vocab_size=9, d_model=4).recipe == (
        "Tokens(PlainAdapter(module), vocab_size=9, table=None)"
    )


def test_a_module_comes_out_as_it_went_in():
    target = nn.Sequential(nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1))
    before = copy.deepcopy(target.state_dict())
    found = adapt(target)
    assert found.module.training
    assert all(torch.equal(x, before[name]) for name, x in target.state_dict().items())
    assert not adapt(target.eval()).module.training
    model = Model()
    adapt(model)
    assert not model.embed._forward_hooks


def test_precisions_and_copies():
    found = adapt(Model())
    x = draw((2, 6, found.d_model), 0).bfloat16()
    outputs = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        module = copy.deepcopy(found.module).to(dtype)
        outputs[dtype] = module(x.to(dtype))
        assert outputs[dtype].dtype == dtype
    exact = outputs[torch.float64]
    assert relative_difference(outputs[torch.float32].double(), exact) < 1e-5
    assert relative_difference(outputs[torch.bfloat16].double(), exact) < 0.1


def test_tokens_are_uniform_and_the_vectors_own():
    x = draw((64, 256, 8 + BITS), 0)
    ids = to_token_ids(x, 32)
    expected = ids.numel() / 32
    chi_squared = ((ids.flatten().bincount(minlength=32) - expected) ** 2 / expected).sum()
    assert chi_squared < 31 + 5 * 62**0.5  # mean + 5 σ of χ² with 31 degrees of freedom
    neighbours = (32 * ids[:, :-1] + ids[:, 1:]).flatten().bincount(minlength=1024)
    expected = neighbours.sum() / 1024
    assert ((neighbours - expected) ** 2 / expected).sum() < 1023 + 5 * 2046**0.5
    assert torch.equal(to_token_ids(x[3:4, 7:9], 32), ids[3:4, 7:9])
    assert torch.equal(to_token_ids(x[3, 7], 32), ids[3, 7])
    # A rounding names no other token.
    assert torch.equal(to_token_ids((x * (1 + 2**-9)).bfloat16(), 32), ids)
    skipping = to_token_ids(x, 5, skip=2)
    assert set(skipping.unique().tolist()) == {0, 1, 3, 4}


def test_gradients_are_those_of_the_embedding():
    model = Model().double()
    reader = adapt(model).module
    x = draw((2, 6, 8 + BITS), 0).requires_grad_()
    against = draw((2, 6, 32), 1)
    (found,) = torch.autograd.grad(reader(x), x, against)
    scale = model.embed.weight.detach().square().mean().sqrt()
    embedded = model.embed(to_token_ids(x.detach(), 32)) + scale * x[..., :-BITS]
    embedded = embedded.detach().requires_grad_()
    places = model.places(torch.arange(6))
    y = model.head(model.gru(embedded + places)[0])
    (asked,) = torch.autograd.grad(y, embedded, against)
    assert relative_difference(found[..., :-BITS], scale * asked) < 1e-7
    assert found[..., -BITS:].abs().max() == 0
    # A small change of x is a change of the embedding, and of no token.
    step = 1e-9 * draw(x.shape, 2)
    with torch.no_grad():
        moved = reader(x + step) - reader(x)
        assert torch.allclose((moved * against).sum(), (found * step).sum(), rtol=1e-4, atol=0)


def test_without_a_table_the_gradient_is_zero():
    reader = Tokens(Model(), vocab_size=32, table=None)
    x = draw((2, 6, 8 + BITS), 0).float().requires_grad_()
    (grad,) = torch.autograd.grad(reader(x).sum(), x)
    assert grad.abs().max() == 0


def test_compiled_it_computes_the_same():
    target = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Tanh())
    module = adapt(target).module.double()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = draw((2, 6, 8 + BITS), seed).requires_grad_()
        y, compiled_y = module(x), compiled(x)
        assert relative_difference(compiled_y, y) < 1e-14
        grads = [torch.autograd.grad(z.sum(), x)[0] for z in (y, compiled_y)]
        assert relative_difference(grads[1], grads[0]) < 1e-13


def test_lengths():
    taken, refused = find_lengths_taken(adapt(Chunked()).module, 8, (5, 16, 32), 3)
    assert taken == (16, 32)
    assert list(refused) == [5]
    assert refused[5].startswith("raised RuntimeError: ")


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        (nn.Bilinear(8, 8, 8), {}, "Bilinear is not .*'input2'; widths 8, 16, 64 .* d_model"),
        (nn.Linear(8, 4), {"d_model": 3}, r"given \[2, 5, 3\], it raised RuntimeError: mat1"),
        (nn.Conv1d(8, 8, 3, padding=2), {}, r"no floats \[b t …\]: \[2, 8, 7\] float32"),
        (Returning(lambda y: y.sum(1)), {}, r"returned no floats \[b t …\]: \[2, 6\] float32"),
        (Returning(lambda y: (y, y)), {"output": 2}, "item 0 .* item 1 .* output"),
        (Model(), {"input": "hidden"}, "hidden: .*indices"),
        (Model(), {"d_model": 5}, "d_model=5 must be 8, the width of embed"),
        (nn.Linear(8, 8), {"input": "tokens"}, "vocab_size may help"),
        (nn.Linear(8, 8), {"input": "words"}, "input='words' must be one of"),
        (nn.Linear(8, 8), {"d_model": 0}, "d_model=0 must be at least 1"),
    ],
)
def test_what_is_not_understood_is_refused(target: nn.Module, options: dict, words: str):
    with pytest.raises(ValueError, match=words) as raised:
        adapt(target, **options)
    assert "\n" not in str(raised.value)


def test_a_recipe_makes_the_adapter():
    names = {name: cls for name, cls in vars(adapters).items() if inspect.isclass(cls)}
    for name, (made, *_) in {**CALLED, **DECODERS}.items():
        torch.manual_seed(0)
        target = made()
        found = adapt(target)
        remade = eval(found.recipe, names | {"module": copy.deepcopy(target)})
        x = draw((2, 16, found.d_model), 0).float()
        assert torch.equal(remade.eval()(x), found.module.eval()(x)), name
