"""SSD by example: chunk borders, precision, what is refused; and the layer around it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lab.hooks import hook_points, hooks
from lab.layers.ssd import SSD
from lab.ops.ssd import ssd
from lab.ops.ssd_decay import decay_matrix, segment_sums
from lab.ops.ssd_forms import per_head, ssd_matrix, ssd_recurrent


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def problem(b: int = 2, t: int = 13, h: int = 4, p: int = 3, g: int = 2, n: int = 5):
    """x, dt, A, B, C, D that remember a few tokens."""
    return (
        normal(b, t, h, p),
        normal(b, t, h, seed=1).sigmoid(),
        -normal(h, seed=2).exp(),
        normal(b, t, g, n, seed=3),
        normal(b, t, g, n, seed=4),
        normal(h, seed=5),
    )


@pytest.mark.parametrize("g", [1, 2, 4])
@pytest.mark.parametrize("chunk_len", [1, 2, 4, 13, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_chunk_gives_the_recurrence(g, chunk_len, dtype):
    inputs = [z.to(dtype) for z in problem(g=g)]
    y, state = ssd(*inputs, chunk_len=chunk_len, initial_state=normal(2, 4, 3, 5).to(dtype))
    exact = [z.double() for z in inputs]
    expected, last = ssd_recurrent(*exact, initial_state=normal(2, 4, 3, 5).to(dtype).double())
    # A few hundred roundings of numbers below 30, near all of random sign.
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=10 * tolerance)
    torch.testing.assert_close(state.double(), last, rtol=0, atol=tolerance)


def test_neighbouring_heads_share_a_group():
    x, dt, A, B, C, D = problem()
    torch.testing.assert_close(
        ssd(x, dt, A, B, C, D)[0], ssd(x, dt, A, B[:, :, [0, 0, 1, 1]], C[:, :, [0, 0, 1, 1]], D)[0]
    )


def test_backends():
    inputs = problem()
    assert torch.equal(ssd(*inputs)[0], ssd(*inputs, backend="torch")[0])
    with pytest.raises(ValueError, match="backend='triton' must be one of auto, torch"):
        ssd(*inputs, backend="triton")


def test_low_precision_computes_in_fp32():
    inputs = [z.bfloat16() for z in problem(t=300)]
    y, state = ssd(*inputs, chunk_len=64)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    expected = ssd_recurrent(*(z.double() for z in inputs))[0]
    # Rounding to bf16 is off by 2^-8 of an entry; fp32 adds next to nothing.
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-3)


def test_gradients_of_gradients():
    assert torch.autograd.gradcheck(decay_matrix, -normal(2, 5).exp().requires_grad_())
    assert torch.autograd.gradgradcheck(decay_matrix, -normal(2, 5).exp().requires_grad_())


@pytest.mark.parametrize("strength", [1e2, 1e4, 1e30])
def test_strong_decay_gives_finite_gradients(strength):
    x, dt, A, B, C, D = (z.float().requires_grad_() for z in problem())
    y, state = ssd(x, dt, A * strength, B, C, D, chunk_len=4)
    (y.sum() + state.sum()).backward()
    for z in (x, dt, A, B, C, D):
        assert z.grad is not None
        assert z.grad.isfinite().all()


def test_mask_after_exp_would_not():
    log_decay = torch.full((4,), -100.0, requires_grad=True)
    sums = log_decay.cumsum(-1)
    unmasked = (sums[:, None] - sums[None, :]).exp()
    unmasked.where(torch.ones(4, 4).tril().bool(), 0).sum().backward()
    assert log_decay.grad is not None
    assert log_decay.grad.isnan().any()


def test_segment_sums_are_a_hundred_times_more_exact_than_differences():
    log_decay = -normal(1, 2048).exp().float()
    exact = segment_sums(log_decay.double())
    causal = torch.ones(2048, 2048).tril(-1).bool()

    def error(log_L: Tensor) -> float:
        return ((log_L - exact) / exact)[0, causal].abs().max().item()

    running = log_decay.cumsum(-1)
    assert error(segment_sums(log_decay)) < 1e-5
    assert error(running[..., :, None] - running[..., None, :]) > 100 * error(
        segment_sums(log_decay)
    )
    L = decay_matrix(log_decay).double()
    # An error relative to the exponent; what underflows is lost whole.
    bound = 1e-5 * exact.exp() * (1 - exact.clamp(min=-1e3)) + 1e-37
    assert ((L - exact.exp()).abs() <= bound).all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("B", normal(2, 13, 3, 5), "B has g=3 groups, must divide x's h=4 heads"),
        ("C", normal(2, 13, 1, 5), r"C \[b t g n\] is \[2, 13, 1, 5\], must be \[2, 13, 2, 5\]"),
        ("dt", normal(2, 12, 4), r"dt \[b t h\] is \[2, 12, 4\], must be \[2, 13, 4\]"),
        ("A", normal(1), r"A \[h\] is \[1\], must be \[4\]"),
        ("D", normal(4, 3), r"D \[h\] is \[4, 3\], must be \[4\]"),
        ("initial_state", normal(1, 4, 3, 5), r"\[1, 4, 3, 5\], must be \[2, 4, 3, 5\]"),
        ("chunk_len", 0, "chunk_len=0 must be at least 1"),
        ("x", normal(2, 0, 4, 3), "x has t=0 tokens"),
    ],
)
def test_refuses(unchecked, name, value, message):
    arguments: dict[str, Any] = dict(zip(("x", "dt", "A", "B", "C", "D"), problem(), strict=True))
    with pytest.raises(ValueError, match=message):
        ssd(**(arguments | {name: value}))


# The layer.


def layer(**options: Any) -> SSD:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"d_state": 6, "n_groups": 2, "chunk_len": 4}
    return SSD(12, 4, **(defaults | options)).double()


OPTIONS = [
    {},
    {"rope_layout": "interleaved", "rope_base": 100.0},
    {"position": "none", "d_state": 5},
    {"groups": "tiled"},
    {"dt_init": "paper"},
    {"skip": False},
    {"n_groups": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layer_applies_its_matrix_and_every_parameter_learns(options):
    mixer, x = layer(**options), normal(2, 13, 12)
    y = mixer(x)
    torch.testing.assert_close(mixer.project(x, mixer.matrix(x) @ mixer.values(x)), y)
    (y * normal(*y.shape, seed=1)).sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.all(), name


def test_layer_is_the_op_between_projections():
    mixer, x = layer(position="none"), normal(2, 13, 12)
    dt = torch.nn.functional.softplus(mixer.dt_proj(x))
    B, C = (f(x).unflatten(-1, (2, 6)) for f in (mixer.B_proj, mixer.C_proj))
    values = mixer.x_proj(x).unflatten(-1, (4, 3))
    z = ssd_recurrent(values, dt, -mixer.A_log.exp(), B, C, mixer.D)[0]
    torch.testing.assert_close(mixer(x), mixer.out_proj(z.flatten(-2)))


def test_rope_changes_the_matrix_off_its_diagonal_only():
    turned, plain = layer(), layer(position="none")
    x = normal(1, 6, 12)
    difference = turned.matrix(x) - plain.matrix(x)
    assert difference.diagonal(dim1=-2, dim2=-1).abs().max() < 1e-14
    assert difference.abs().amax((0, 2, 3)).min() > 1e-4


@pytest.mark.parametrize(("n_groups", "same"), [(1, True), (2, False), (4, True)])
def test_tiled_groups_differ_between_one_group_and_one_a_head(n_groups, same):
    """Erratum S3."""
    x = normal(1, 6, 12)
    tiled, interleaved = (
        layer(n_groups=n_groups, groups=groups).matrix(x) for groups in ("tiled", "interleaved")
    )
    assert torch.allclose(tiled, interleaved) == same


def test_initial_memory():
    torch.manual_seed(0)
    mixer = SSD(64, 64, d_state=2)
    dt = torch.nn.functional.softplus(mixer.dt_proj.bias)
    assert 1e-3 * 0.99 <= dt.min() < 4e-3 < 3e-2 < dt.max() <= 0.1 * 1.01
    assert 0 <= mixer.A_log.min() < 1 < 2.6 < mixer.A_log.max() <= torch.tensor(16.0).log()
    printed = SSD(64, 64, d_state=2, dt_init="paper")
    assert printed.dt_proj.bias is None
    torch.testing.assert_close(printed.A_log.exp(), torch.arange(1.0, 65))


def test_half_precision_layers():
    mixer, x = layer(), normal(2, 40, 12)
    expected = mixer(x)
    assert (mixer.bfloat16()(x.bfloat16()) - expected).abs().max() < 0.05 * expected.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        actual = mixer.float()(x.float())
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()


HOOKS = ["dt", "log_decay", "B_pre", "B_rot", "C_pre", "C_rot", "ssm_write", "ssm_state", "ssm_out"]


def test_hook_points_and_what_passes_them():
    mixer, x, seen = layer(), normal(2, 13, 12), {}
    assert set(hook_points(mixer)) == {f"hook_{name}" for name in HOOKS}
    with hooks(mixer, [(None, lambda z, point: seen.__setitem__(point.name, z))]):
        y = mixer(x)
    torch.testing.assert_close(y, mixer(x))
    assert (seen["hook_log_decay"] <= 0).all()
    torch.testing.assert_close(seen["hook_log_decay"], seen["hook_dt"] * -mixer.A_log.exp())
    for name in ("B_pre", "B_rot", "C_pre", "C_rot"):
        assert seen[f"hook_{name}"].shape == (2, 13, 2, 6)
    values = mixer.values(x).transpose(1, 2)
    write = (seen["hook_dt"][..., None] * values)[..., None] * per_head(
        seen["hook_B_rot"], 4
    ).unsqueeze(-2)
    torch.testing.assert_close(seen["hook_ssm_write"], write)
    for t in (1, 5, 13):
        inputs = (values, seen["hook_dt"], seen["hook_B_rot"], seen["hook_C_rot"])
        some, dt, B, C = (z[:, :t] for z in inputs)
        z, state = ssd_recurrent(some, dt, -mixer.A_log.exp(), B, C, mixer.D)
        torch.testing.assert_close(seen["hook_ssm_state"][:, t - 1], state)
        torch.testing.assert_close(seen["hook_ssm_out"][:, :t], z)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("groups", ["interleaved", "tiled"])
def test_what_a_hook_returns_is_used(name, groups):
    mixer, x = layer(groups=groups), normal(2, 13, 12)
    before = mixer(x)

    def halve_at_6(z: Tensor, point) -> Tensor:
        return torch.cat([z[:, :6], z[:, 6:7] / 2, z[:, 7:]], dim=1)

    with hooks(mixer, [(f"hook_{name}", halve_at_6)]):
        after = mixer(x)
        applied = mixer.project(x, mixer.matrix(x) @ mixer.values(x))
    changed = (after - before).abs().amax((0, 2)) > 1e-9
    assert not changed[:6].any()
    assert changed[6]
    # Outputs, reads and states replaced at one token leave the others as they are.
    reads = name in {"C_pre", "C_rot", "ssm_state", "ssm_out"}
    assert changed[7:].any() == (not reads)
    if name not in {"ssm_write", "ssm_state"}:
        torch.testing.assert_close(applied, after)


def test_writes_hooked_away_leave_the_skip():
    mixer, x = layer(), normal(2, 13, 12)
    with hooks(mixer, [("hook_ssm_write", lambda z, _: torch.zeros_like(z))]):
        y = mixer(x)
    assert mixer.D is not None
    torch.testing.assert_close(y, mixer.project(x, mixer.D[:, None, None] * mixer.values(x)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 13}, "d_model=13 must be a positive multiple of n_heads=4"),
        ({"n_groups": 3}, "n_groups=3 must divide n_heads=4"),
        ({"d_state": 5}, "d_state=5 must be even for position='rope'"),
        ({"d_state": 0}, "d_state=0 must be at least 1"),
        ({"chunk_len": 0}, "chunk_len=0 must be at least 1"),
        ({"position": "alibi"}, "position='alibi' must be one of rope, none"),
        ({"rope_layout": "halves"}, "rope_layout='halves' must be one of half, interleaved"),
        ({"dt_init": "zero"}, "dt_init='zero' must be one of mamba2, paper"),
        ({"groups": "mixed"}, "groups='mixed' must be one of interleaved, tiled"),
    ],
)
def test_layer_refuses(unchecked, options, message):
    with pytest.raises(ValueError, match=message):
        SSD(**({"d_model": 12, "n_heads": 4} | options))


def test_matrix_is_the_recurrence_written_out():
    x, dt, A, B, C, D = problem()
    y = torch.einsum("bhts,bshp->bthp", ssd_matrix(dt, A, B, C, D), x)
    torch.testing.assert_close(y, ssd_recurrent(x, dt, A, B, C, D)[0])
