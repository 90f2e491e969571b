"""Computing only what is read: the same numbers and gradients as computing everything."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lab.layers.attention import Attention
from lab.layers.mixer import take_positions
from lab.models import ARCHITECTURES, build
from lab.models.block import Block
from lab.models.evaluation import find_places, read_hidden, read_hidden_at, score
from lab.models.language_model import LanguageModel
from lab.models.user_mixer import check_mixers
from lab.ops.cross_entropy import linear_cross_entropy
from tasks import TASKS
from tasks.vectors import VectorTask
from tests.cases import MIXERS, TRANSFORMS

AT = torch.tensor([[2, 5, 9], [0, 7, 7], [11, 3, 1]])
SOME = torch.zeros(3, 14, dtype=torch.bool)
SOME[0, [2, 9]] = SOME[1, [0, 3, 10]] = SOME[2, 5] = True


# The grouped kernel has no fp64.
FP64_TRANSFORMS = [case for case in TRANSFORMS if case.name != "routed grouped"]


class Mean(nn.Module):
    """A user's mixer, which does not offer to compute some positions only."""

    def __init__(self, d_model):
        super().__init__()
        self.value = nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.value(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Future(Mean):
    """A user's mixer that is not causal."""

    def forward(self, x):
        return self.value(x).mean(1, keepdim=True).expand_as(x)


class Offering(Mean):
    """A user's mixer that computes some positions only."""

    def forward(self, x, at=None):
        y = super().forward(x)
        return y if at is None else take_positions(y, at)


class Reversed(Offering):
    """One that returns its outputs in another order."""

    def forward(self, x, at=None):
        return super().forward(x, None if at is None else at.flip(1))


class Peeking(Offering):
    """One that is not causal."""

    def forward(self, x, at=None):
        return super().forward(x, at) + x.mean(1, keepdim=True)


class Doubled(Attention):
    """A user's subclass that changes what the inherited `forward` relies on."""

    def project(self, x, z):
        return super().project(x, z) * x


for users in (Mean, Future, Offering, Reversed, Peeking, Doubled):
    users.__module__ = "my_mixers"


def make_model(mixer, mlp=None, d_model=8):
    """A model whose last block, and all before it, has the given layers."""
    torch.manual_seed(0)
    blocks = [Block(d_model, make(mixer), make(mlp)) for _ in range(2)]
    return LanguageModel(blocks, vocab_size=11, d_model=d_model).double()


def make(layer):
    return layer() if layer is not None else None


def differentiate(model, loss):
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


def assert_same(model, tokens, scored):
    """Compare values and gradients with those of the whole form."""
    got, whole = read_hidden(model, tokens, find_places(scored)), model.hidden(tokens)[scored]
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-12)
    weights = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(1))
    for mine, other in zip(
        differentiate(model, (got * weights).sum()),
        differentiate(model, (whole * weights).sum()),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def takes_positions(model):
    mixer = model.list_blocks()[1].mixer
    assert mixer is not None
    return mixer.takes_positions


def draw_tokens(t=14):
    return torch.randint(11, (3, t), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("case", MIXERS, ids=lambda c: c.name)
def test_every_mixer_computes_the_same_at_some_positions(case):
    model = make_model(case.make, d_model=case.d_model)
    wrapped = case.kind == "sequence" or "oracle" in case.name
    assert takes_positions(model) == (not wrapped)
    assert_same(model, draw_tokens(), SOME)


@pytest.mark.parametrize("case", FP64_TRANSFORMS, ids=lambda c: c.name)
def test_every_state_transform_computes_the_same_at_some_positions(case):
    model = make_model(lambda: Attention(8, 2), case.make)
    model.train()
    assert_same(model, draw_tokens(), SOME)


@pytest.mark.parametrize("mixer", [Mean, Future, Doubled])
def test_a_users_mixer_that_offers_nothing_sees_every_position(mixer):
    model = make_model(lambda: mixer(8), lambda: nn.Linear(8, 8))
    assert not takes_positions(model)
    assert_same(model, draw_tokens(), SOME)


def test_a_users_mixer_that_offers_positions_keeps_its_word():
    model = make_model(lambda: Offering(8), lambda: nn.Linear(8, 8))
    assert takes_positions(model)
    assert_same(model, draw_tokens(), SOME)
    with check_mixers(model):
        model(draw_tokens())
    for wrong in (Reversed, Peeking):
        model = make_model(lambda wrong=wrong: wrong(8))
        with check_mixers(model), pytest.raises(ValueError, match=f"{wrong.__name__}.*differ"):
            model(draw_tokens())


@pytest.mark.parametrize("stack", ["NM*2", "AM NM", "SM AN NM"])
def test_blocks_without_a_mixer_come_after_the_choice(stack):
    model = build(stack, vocab_size=11, d_model=8).double()
    assert_same(model, draw_tokens(), SOME)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_computes_the_same(name):
    model = ARCHITECTURES[name](vocab_size=11, d_model=8, n_heads=2, d_ff=8, n_experts=12).double()
    assert_same(model, draw_tokens(), SOME)


@pytest.fixture
def seen(monkeypatch):
    """An attention model, and the shapes that its last MLP is given."""
    model, shapes = build("AM*2", vocab_size=64, d_model=8), []
    block = model.blocks[1]
    assert isinstance(block, Block)
    transform = block._transform

    def watch(x):
        shapes.append(list(x.shape))
        return transform(x)

    monkeypatch.setattr(block, "_transform", watch)
    return model, shapes


def test_nothing_else_is_computed_in_the_last_block(seen):
    model, shapes = seen
    read_hidden_at(model, draw_tokens(), AT)
    assert shapes == [[3, 3, 8]]


def test_nothing_after_the_last_position_is_computed(seen):
    model, shapes = seen
    every = torch.arange(6).expand(3, -1)
    hidden = read_hidden_at(model, draw_tokens(), every)
    assert shapes == [[3, 6, 8]], "six positions are all of those that matter"
    torch.testing.assert_close(hidden, model.hidden(draw_tokens())[:, :6])


def test_a_hook_gets_whole_tensors(seen):
    model, shapes = seen
    caught = []
    with model.hooks([("blocks.1.mlp.hook_pre", lambda x, hook: caught.append(x.shape))]):
        read_hidden_at(model, draw_tokens(), AT)
    handle = model.blocks[1].mlp.register_forward_hook(lambda m, a, y: caught.append(y.shape))
    read_hidden_at(model, draw_tokens(), AT)
    handle.remove()
    assert [list(shape) for shape in caught] == [[3, 14, 32], [3, 14, 8]]
    assert shapes == [[3, 14, 8]] * 2


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(8)])
def test_dropout_and_batch_norm_in_training_see_every_position(seen, layer):
    model, shapes = seen
    model.blocks[0].extra = layer
    read_hidden_at(model.train(), draw_tokens(), AT)
    read_hidden_at(model.eval(), draw_tokens(), AT)
    assert shapes == [[3, 14, 8], [3, 3, 8]]


TOKEN_TASKS = [name for name, task in TASKS.items() if not issubclass(task, VectorTask)]


@pytest.mark.parametrize("name", TOKEN_TASKS)
def test_the_loss_of_every_task_is_that_of_all_logits(name):
    task = TASKS[name]()
    batch = task.batch(size=3)
    model = build("AM SM", vocab_size=task.vocab_size, d_model=8).double()
    hidden, head, targets = score(model, batch, "fp32")
    loss, _ = linear_cross_entropy(hidden, head, targets)
    logits = model(batch.inputs).flatten(0, 1)
    usual = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=-100)
    assert loss.item() == pytest.approx(usual.item(), rel=1e-12, abs=1e-12)
