"""The laws: right modules pass, and a planted fault of each kind is found."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.laws import CONDITIONS, LAWS, Condition, Verdict, certify


def verdicts(
    module: nn.Module | Callable[[Tensor], Tensor],
    lengths: tuple[int, ...] = (1, 2, 5, 16),
    conditions: tuple[Condition, ...] = CONDITIONS[:1],
) -> dict[str, Verdict]:
    found = certify(
        module, 8, lengths, conditions=conditions, max_len=1024, rounding_len=128, seconds=60.0
    )
    return {v.law: v for v in found}


class Mixing(nn.Module):
    """A module made of a function, with a weight for the gradient to reach."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class TorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT)[..., :-2].mT


def in_single(x: Tensor) -> Tensor:
    """Rounds to fp32 on the way, as many a normalisation does."""
    return (x.float().cumsum(1).sin() / 3).to(x.dtype)


@pytest.mark.parametrize(
    "build",
    [TorchAttention, Recurrent, Convolution, lambda: Mixing(in_single), lambda: Mixing(torch.tanh)],
    ids=["torch attention", "gru", "convolution", "fp32 inside", "pointwise"],
)
def test_right_modules_pass(build: Callable[[], nn.Module]):
    asked = dict.fromkeys(LAWS, "holds") | {
        "matrix applies": "not applicable",
        "prefill = step": "not applicable",
        "relative": "not applicable",
        "padding": "not applicable",
        "forms agree": "not decided",
    }
    torch.manual_seed(0)
    for law, v in verdicts(build()).items():
        assert v.verdict == asked[law], v


def off_by_one(x: Tensor) -> Tensor:
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)
    return F.scaled_dot_product_attention(x, x, x, attn_mask=seen)


def top_two_of_all(x: Tensor) -> Tensor:
    """Masks causally, but picks the keys by looking at the whole sequence."""
    size = x.norm(dim=-1)
    chosen = size >= size.topk(min(2, x.shape[1])).values[:, -1:]
    return (x * chosen[..., None]).cumsum(1)


def leaks_by_gradient(x: Tensor) -> Tensor:
    future = x.mean(dim=1, keepdim=True)
    return x + (future - future.detach())


def leaks_when_large(x: Tensor) -> Tensor:
    """Looks ahead only for what no ordinary input holds."""
    return x + (x.abs().amax(dim=(1, 2), keepdim=True) > 4)


def leaks_across_chunks(x: Tensor) -> Tensor:
    """Right within chunks of four, whose last token also reads the next chunk's first."""
    y = x.cumsum(1)
    y[:, 3:-1:4] += x[:, 4::4]
    return y


@pytest.mark.parametrize(
    ("law", "fault"),
    [
        ("causal", lambda x: x + 1e-6 * x.mean(dim=1, keepdim=True)),
        ("causal", lambda x: x.flip(1).cumsum(1).flip(1)),
        ("causal", off_by_one),
        ("causal", top_two_of_all),
        ("causal", leaks_by_gradient),
        ("causal", leaks_when_large),
        ("causal", leaks_across_chunks),
        ("causal", lambda x: x * x.shape[1]),
        ("stable", lambda x: x / (x - x)),
        ("batch-invariant", lambda x: (x - x.mean(dim=0)) / (1 + x.var(dim=0, correction=0))),
        ("batch-invariant", lambda x: x + torch.arange(len(x))[:, None, None]),
        ("deterministic", lambda x: F.dropout(x, 0.1)),
    ],
    ids=[
        "small peek",
        "reversed",
        "mask off by one",
        "top keys of all",
        "gradient only",
        "large values only",
        "chunk border",
        "scaled by length",
        "nan",
        "normalised over the batch",
        "row number",
        "dropout",
    ],
)
def test_planted_faults_are_found(law: str, fault: Callable[[Tensor], Tensor]):
    found = verdicts(Mixing(fault))
    assert found[law].verdict == "fails", found
    assert found[law].counterexample


def test_counterexample_is_the_shortest():
    found = verdicts(Mixing(off_by_one), lengths=(7, 1, 3))["causal"]
    assert found.counterexample == "length 2: changing position 1 moves output 0 of row 0"


def test_noise_is_not_called_a_leak():
    found = verdicts(Mixing(lambda x: x * random.random()))
    assert found["causal"].verdict == "not decided"
    assert found["causal"].evidence.startswith("length 1: a second call moves the output by ")


def test_random_numbers_are_held_by_a_seed():
    found = verdicts(Mixing(lambda x: F.dropout(x, 0.1) + 1e-3 * x.mean(1, keepdim=True)))
    assert found["deterministic"].verdict == "fails"
    assert found["causal"].verdict == "fails"
    assert verdicts(Mixing(lambda x: F.dropout(x, 0.1)))["causal"].verdict == "holds"


def test_detached_and_silent_parameters_are_named():
    class Faulty(Mixing):
        def __init__(self):
            super().__init__(torch.tanh)
            self.detached = nn.Parameter(torch.ones(8))
            self.silent = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.detached.detach() + 0 * self.silent

    found = verdicts(Faulty())["gradient reach"]
    assert found.verdict == "fails"
    assert found.counterexample is not None
    assert found.counterexample.startswith("detached: none, cut by Tensor.detach at ")
    assert "; silent: zero, multiplied by zero in Tensor.mul at " in found.counterexample


@pytest.mark.parametrize("missing", ["scale", "mask", "nothing"])
def test_wrong_matrix_is_found(missing: str):
    class Shown(Mixing):
        def __init__(self):
            super().__init__(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))

        def matrix(self, x: Tensor) -> Tensor:
            x = self.linear(x)[:, None]
            scores = x @ x.mT * (1 if missing == "scale" else 8**-0.5)
            if missing != "mask":
                future = torch.ones_like(scores, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(future, -torch.inf)
            return scores.softmax(dim=-1)

        def values(self, x: Tensor) -> Tensor:
            return self.linear(x)[:, None]

        def project(self, x: Tensor, z: Tensor) -> Tensor:
            return z[:, 0]

    found = verdicts(Shown())
    assert found["matrix applies"].verdict == ("holds" if missing == "nothing" else "fails")
    assert found["causal"].verdict == "holds"


def test_laws_go_by_the_names_of_their_verdicts():
    assert list(verdicts(nn.Linear(8, 8))) == list(LAWS)


def test_certify_leaves_the_module_as_it_was():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.mT).mT

    module = Normalised()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    training = verdicts(module, (2, 5), CONDITIONS)["batch-invariant"]
    assert training.verdict == "fails"
    assert training.counterexample is not None
    assert training.counterexample.endswith("(seed 3, weights moved, training)")
    assert verdicts(module.eval(), (2, 5), CONDITIONS)["batch-invariant"].verdict == "holds"
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.dtype == before[name].dtype, name


@pytest.mark.parametrize(
    "options", [{"lengths": ()}, {"lengths": (0, 2)}, {"batch": 0}, {"max_len": 0}]
)
def test_empty_probes_are_refused(options: dict):
    with pytest.raises(ValueError, match="at least 1"):
        certify(nn.Linear(8, 8), d_model=8, **options)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_time_is_refused(seconds: float):
    with pytest.raises(ValueError, match=f"seconds={seconds} must be above 0"):
        certify(nn.Linear(8, 8), d_model=8, seconds=seconds)


@pytest.mark.parametrize(
    ("function", "outcome"),
    [
        (lambda x: x.cumsum(1) / 3, "holds"),
        (lambda x: x + x.mean(dim=1, keepdim=True), "fails"),
        (Mixing(off_by_one).forward, "fails"),
    ],
    ids=["running sum", "mean of all", "method"],
)
def test_functions_are_tried(function: Callable[[Tensor], Tensor], outcome: str):
    found = verdicts(function)
    assert list(found) == list(LAWS)
    assert found["causal"].verdict == outcome
    assert found["batch-invariant"].verdict == "holds"
    for law in ("gradient reach", "table reach", "prefill = step", "matrix applies"):
        assert found[law].verdict == "not applicable"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(7, 8), "Linear .* it raised RuntimeError: mat1 and mat2"),
        (lambda x, y: x + y, "lambda.* it raised TypeError: .* argument: 'y'"),
        (lambda x: x.mT, r"returned"),
    ],
    ids=["width", "arguments", "order"],
)
def test_what_does_not_map_sequences_is_refused(module: Callable, words: str, unchecked):
    # The types' check would speak first.
    with pytest.raises(ValueError, match=words):
        certify(module, d_model=8)
