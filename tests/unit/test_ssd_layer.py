"""The SSD layer: its variants against their definitions, hooks, decoding, what is refused."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.hooks import hook_points, hooks
from lab.layers.ssd import SSD, SSDState
from lab.layers.state import Decoder
from lab.ops.ssd_backends import BACKENDS
from lab.ops.ssd_forms import per_head, ssd_recurrent


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def layer(**options: Any) -> SSD:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"d_state": 6, "n_groups": 2, "chunk_len": 4}
    return SSD(12, 4, **(defaults | options)).double()


def moved(**options: Any) -> SSD:
    """Return the layer with noise on its parameters, so that it forgets, skips and gates."""
    mixer = layer(**options)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(torch.randn_like(parameter) / 2)
    return mixer


POSITIONS, GATES = ("rope", "conv", "decay", "none"), ("none", "silu", "norm")
VARIANTS: list[dict[str, Any]] = [
    *(
        {"position": position, "n_groups": g, "gate": gate}
        for position, g, gate in product(POSITIONS, (1, 2, 4), GATES)
    ),
    {"rope_layout": "interleaved", "rope_base": 100.0},
    {"groups": "tiled"},
    {"groups": "tiled", "position": "conv", "gate": "norm"},
    {"dt_init": "paper"},
    {"dt_init": "paper", "position": "none"},
    {"skip": False},
    {"position": "conv", "skip": False, "conv_width": 1},
    {"position": "conv", "conv_width": 2, "d_state": 5},
    {"position": "conv", "conv_width": 7},
    {"d_inner": 24, "position": "conv", "gate": "norm"},
    {"d_inner": 8},
]
every_variant = pytest.mark.parametrize("options", VARIANTS, ids=str)


@every_variant
def test_layer_applies_its_matrix_and_every_parameter_learns(options):
    mixer, x = layer(**options), normal(2, 13, 12)
    y = mixer(x)
    torch.testing.assert_close(mixer.project(x, mixer.matrix(x) @ mixer.values(x)), y)
    (y * normal(*y.shape, seed=1)).sum().backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.all(), name


def rates(mixer: SSD) -> Tensor:
    """Return A."""
    assert mixer.A_log is not None
    return -mixer.A_log.exp()


def inputs(mixer: SSD, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, dt, B and C as their projections give them."""
    B, C = (f(x).unflatten(-1, (2, 6)) for f in (mixer.B_proj, mixer.C_proj))
    return mixer.x_proj(x).unflatten(-1, (4, -1)), F.softplus(mixer.dt_proj(x)), B, C


def test_layer_is_the_op_between_projections():
    mixer, x = layer(position="decay"), normal(2, 13, 12)
    values, dt, B, C = inputs(mixer, x)
    z = ssd_recurrent(values, dt, rates(mixer), B, C, mixer.D)[0]
    torch.testing.assert_close(mixer(x), mixer.out_proj(z.flatten(-2)))


def test_without_a_position_it_is_linear_attention():
    mixer, x = moved(position="none"), normal(2, 13, 12)
    assert mixer.A_log is None
    assert mixer.D is not None
    values, dt, B, C = inputs(mixer, x)
    scores = torch.einsum("bthn,bshn->bhts", per_head(C, 4), per_head(B, 4)).tril()
    z = torch.einsum("bhts,bsh,bshp->bthp", scores, dt, values) + mixer.D[:, None] * values
    torch.testing.assert_close(mixer(x), mixer.out_proj(z.flatten(-2)))


def test_convolution_and_gated_norm_make_mamba2():
    mixer, x = moved(position="conv", gate="norm", d_inner=24), normal(2, 13, 12)
    assert mixer.conv is not None
    assert mixer.z_proj is not None
    assert mixer.norm_weight is not None
    joint = torch.cat([f(x) for f in (mixer.x_proj, mixer.B_proj, mixer.C_proj)], dim=-1)
    kernel = mixer.conv.weight[:, None]
    joint = F.conv1d(joint.mT, kernel, mixer.conv.bias, padding=3, groups=48)[..., :13].mT
    values, B, C = F.silu(joint).split([24, 12, 12], dim=-1)
    values, (B, C) = values.unflatten(-1, (4, 6)), (z.unflatten(-1, (2, 6)) for z in (B, C))
    dt = F.softplus(mixer.dt_proj(x))
    y = ssd_recurrent(values, dt, rates(mixer), B, C, mixer.D)[0].flatten(-2)
    y = y * F.silu(mixer.z_proj(x))
    parts = y.unflatten(-1, (2, 12))
    parts = parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(mixer(x), mixer.out_proj(parts.flatten(-2) * mixer.norm_weight))


def test_rope_changes_the_matrix_off_its_diagonal_only():
    turned, plain = layer(), layer(position="decay")
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
    A = rates(mixer)
    assert -16 <= A.min() < -13.5 < -2.7 < A.max() <= -1
    printed = SSD(64, 64, d_state=2, dt_init="paper")
    assert printed.dt_proj.bias is None
    torch.testing.assert_close(-rates(printed), torch.arange(1.0, 65))


@pytest.mark.parametrize("options", [{}, {"position": "conv", "gate": "norm"}], ids=str)
def test_half_precision_layers(options):
    mixer, x = layer(**options), normal(2, 40, 12)
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
    torch.testing.assert_close(seen["hook_log_decay"], seen["hook_dt"] * rates(mixer))
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
        z, state = ssd_recurrent(some, dt, rates(mixer), B, C, mixer.D)
        torch.testing.assert_close(seen["hook_ssm_state"][:, t - 1], state)
        torch.testing.assert_close(seen["hook_ssm_out"][:, :t], z)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(
    "options", [{}, {"groups": "tiled"}, {"position": "conv"}, {"gate": "silu"}], ids=str
)
def test_what_a_hook_returns_is_used(name, options):
    mixer, x = layer(**options), normal(2, 13, 12)
    before = mixer(x)

    def halve_at_6(z: Tensor, point) -> Tensor:
        return torch.cat([z[:, :6], z[:, 6:7] / 2, z[:, 7:]], dim=1)

    with hooks(mixer, [(f"hook_{name}", halve_at_6)]):
        after = mixer(x)
        applied = mixer.project(x, mixer.matrix(x) @ mixer.values(x))
    changed = (after - before).abs().amax((0, 2)) > 1e-9
    assert not changed[:6].any()
    assert changed[6]
    # Outputs, reads and states replaced at one token leave the others as they are, but what the
    # convolution sums reaches those after it.
    reads = {"C_rot", "ssm_state", "ssm_out"} | ({"C_pre"} if mixer.conv is None else set())
    assert changed[7:].any() == (name not in reads)
    if name not in {"ssm_write", "ssm_state"}:
        torch.testing.assert_close(applied, after)


def test_writes_hooked_away_leave_the_skip():
    mixer, x = layer(), normal(2, 13, 12)
    with hooks(mixer, [("hook_ssm_write", lambda z, _: torch.zeros_like(z))]):
        y = mixer(x)
    assert mixer.D is not None
    torch.testing.assert_close(y, mixer.project(x, mixer.D[:, None, None] * mixer.values(x)))


@pytest.mark.parametrize("position", ["decay", "none"])
def test_a_hook_may_put_in_any_decay(position):
    mixer, x = moved(position=position), normal(2, 13, 12)
    log_decay = -normal(2, 13, 4, seed=1).exp()
    values, dt, B, C = inputs(mixer, x)
    # A rate for each token: t steps of one token, with dt moved from the decay to the write.
    z, state = ssd_recurrent(
        values * (dt / -log_decay)[..., None], -log_decay, -torch.ones(4), B, C
    )
    assert mixer.D is not None
    z = z + mixer.D[:, None] * values
    with hooks(mixer, [("hook_log_decay", lambda z, _: log_decay)]):
        y, last = mixer.prefill(x)
    torch.testing.assert_close(y, mixer.out_proj(z.flatten(-2)))
    torch.testing.assert_close(last.ssm, state)


# Decoding.


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def assert_same_states(actual: SSDState, expected: SSDState) -> None:
    assert_same(actual.ssm, expected.ssm)
    assert_same(actual.conv, expected.conv)
    assert torch.equal(actual.position, expected.position)


def in_steps(mixer: SSD, x: Tensor, state: SSDState) -> tuple[Tensor, SSDState]:
    """Return what `prefill` does, a token at a time."""
    outputs = []
    for token in x.unbind(1):
        y, state = mixer.step(token, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def shapes(state: SSDState) -> list[tuple[int, ...]]:
    return [tuple(z.shape) for z in state]


@every_variant
def test_parallel_is_stepwise(options):
    mixer, x = moved(**options), normal(2, 13, 12)
    assert isinstance(mixer, Decoder)
    y, last = mixer.prefill(x)
    assert torch.equal(mixer(x), y)
    assert last.position.tolist() == [13, 13]
    start = mixer.start(2)
    assert shapes(start) == shapes(last)
    for cut in (0, 1, 3, 4, 5, 8, 12):
        # A stretch at once from no state and from one, and the rest by steps.
        state = mixer.prefill(x[:, :cut])[1] if cut else start
        for go_on in (mixer.prefill, lambda x, state: in_steps(mixer, x, state)):
            some, after = go_on(x[:, cut:], state)
            assert_same(some, y[:, cut:])
            assert_same_states(after, last)


def test_gradients_pass_through_a_carried_state():
    mixer, x = moved(position="conv", gate="norm"), normal(2, 9, 12).requires_grad_()
    leaves, against = [x, *mixer.parameters()], normal(2, 9, 12, seed=1)
    first, state = mixer.prefill(x[:, :5])
    actual = torch.cat([first, in_steps(mixer, x[:, 5:], state)[0]], dim=1)
    assert_same(
        torch.autograd.grad(actual, leaves, against),
        torch.autograd.grad(mixer(x), leaves, against),
    )


KEEP = torch.tensor(
    [
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],  # padded on the left
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0],  # on the right
        [0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 0],  # wherever
        [1] * 13,
        [0] * 13,
    ]
).bool()


@every_variant
@pytest.mark.parametrize("carried", [False, True])
def test_padding_is_not_read(options, carried):
    mixer, x = moved(**options), normal(5, 13, 12)
    x[~KEEP] = torch.nan
    state = mixer.prefill(normal(5, 3, 12, seed=1))[1] if carried else mixer.start(5)
    y, last = mixer.prefill(x, state if carried else None, KEEP)
    assert y.isfinite().all()
    after = mixer.step(normal(5, 12, seed=2), last)[0]
    for row in range(5):
        here = slice(row, row + 1)
        before = SSDState(*(z[here] for z in state))
        expected, expected_last = y[here, :0], before
        if KEEP[row].any():
            expected, expected_last = mixer.prefill(x[here, KEEP[row]], before)
        assert_same(y[here, KEEP[row]], expected)
        assert_same_states(SSDState(*(z[here] for z in last)), expected_last)
        assert_same(after[here], mixer.step(normal(5, 12, seed=2)[here], expected_last)[0])


@pytest.mark.parametrize("position", POSITIONS)
def test_padding_gets_no_gradient_and_changes_none(position):
    mixer, x = moved(position=position, gate="norm"), normal(5, 13, 12).requires_grad_()
    y, _ = mixer.prefill(x, keep=KEEP)
    (grad,) = torch.autograd.grad((y * normal(*y.shape, seed=1)).sum(), x)
    assert not grad[~KEEP].any()
    alone = mixer.prefill(x[:1, KEEP[0]])[0]
    loss = (alone * normal(*y.shape, seed=1)[:1, KEEP[0]]).sum()
    assert_same(grad[:1], torch.autograd.grad(loss, x)[0][:1])


@every_variant
def test_only_distances_count(options):
    mixer, x = moved(**options), normal(2, 9, 12)
    assert mixer.relative
    y, last = mixer.prefill(x)
    for go_on in (mixer.prefill, lambda x, state: in_steps(mixer, x, state)):
        shifted, far = go_on(x, mixer.start(2, position=1000))
        assert_same(shifted, y)
        assert far.position.tolist() == [1009, 1009]
    apart = SSDState(*mixer.start(2)[:2], position=torch.tensor([7, 300]))
    assert_same(mixer.prefill(x, apart)[0], y)
    # The state is turned with what was written in it.
    if options.get("position", "rope") != "rope":
        assert_same(far.ssm, last.ssm)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_looks_changes_no_state(position, name):
    mixer, x = moved(position=position), normal(2, 9, 12)
    y, last = mixer.prefill(x)
    seen = []
    with hooks(mixer, [(f"hook_{name}", lambda z, _: seen.append(z.shape[1]))]):
        first, state = mixer.prefill(x[:, :3])
        second, state = mixer.prefill(x[:, 3:7], state)
        third, state = in_steps(mixer, x[:, 7:], state)
    assert seen == [3, 4, 1, 1]
    assert_same(torch.cat([first, second, third], dim=1), y)
    assert_same_states(state, last)


@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_returns_is_carried(name):
    mixer, x = moved(), normal(2, 9, 12)
    with hooks(mixer, [(f"hook_{name}", lambda z, _: z / 2)]):
        y, last = mixer.prefill(x)
        first, state = mixer.prefill(x[:, :4])
        second, state = in_steps(mixer, x[:, 4:], state)
    assert_same(torch.cat([first, second], dim=1), y)
    assert_same_states(state, last)
    assert (y - mixer(x)).abs().max() > 1e-3


def test_the_state_is_in_fp32_at_least_and_small():
    mixer, x = layer(position="conv").bfloat16(), normal(2, 40, 12).bfloat16()
    y, last = mixer.prefill(x)
    assert y.dtype == torch.bfloat16
    for state in (mixer.start(2), last, mixer.step(x[:, 0], last)[1]):
        assert (state.ssm.dtype, state.conv.dtype) == (torch.float32, torch.float32)
        assert (state.ssm.shape, state.conv.shape) == ((2, 4, 3, 6), (2, 3, 36))
        for z in state:
            assert z.untyped_storage().nbytes() == z.numel() * z.element_size()
    assert layer().start(2).conv.numel() == 0


def test_sequences_are_computed_by_the_backend_named(monkeypatch):
    calls = []

    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(arguments[0].shape[1])
        return BACKENDS["torch"].run(*arguments)

    monkeypatch.setitem(BACKENDS, "counted", BACKENDS["torch"]._replace(run=run))
    mixer, x = layer(backend="counted"), normal(2, 9, 12)
    assert_same(mixer(x), layer()(x))
    assert calls == [9]
    layer(backend="torch")(x)
    assert calls == [9]


@pytest.mark.parametrize("position", ["rope", "conv"])
def test_refuses_states_and_padding_that_do_not_fit(unchecked, position):
    mixer, x = layer(position=position), normal(2, 5, 12)
    with pytest.raises(ValueError, match="state is of a batch of 3, x of 2"):
        mixer.prefill(x, mixer.start(3))
    with pytest.raises(ValueError, match="state is of a batch of 3, x of 2"):
        mixer.step(x[:, 0], mixer.start(3))
    with pytest.raises(ValueError, match=r"\[2, 4, 3, 4\], must be \[2, 4, 3, 6\]"):
        mixer.prefill(
            x, layer(position=position, d_state=4).start(2)._replace(conv=mixer.start(2).conv)
        )
    with pytest.raises(ValueError, match=r"keep is torch.bool \[2, 4\], must be bool \[2, 5\]"):
        mixer.prefill(x, keep=torch.ones(2, 4).bool())


def test_refuses_the_tail_of_another_convolution(unchecked):
    mixer, other = layer(position="conv"), layer(position="conv", conv_width=3)
    for call in (mixer.prefill, lambda x, state: mixer.step(x[:, 0], state)):
        with pytest.raises(ValueError, match=r"tail is \[2, 2, 36\], must be \[2, 3, 36\]"):
            call(normal(2, 5, 12), other.start(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 13}, "d_model=13 must be a positive multiple of n_heads=4"),
        ({"d_model": 0}, "d_model=0 must be at least 1"),
        ({"d_inner": 13}, "d_inner=13 must be a positive multiple of n_heads=4"),
        ({"d_inner": 0}, "d_inner=0 must be a positive multiple of n_heads=4"),
        ({"n_groups": 3}, "n_groups=3 must divide n_heads=4"),
        ({"d_state": 5}, "d_state=5 must be even for position='rope'"),
        ({"d_state": 0}, "d_state=0 must be at least 1"),
        ({"chunk_len": 0}, "chunk_len=0 must be at least 1"),
        ({"conv_width": 4}, "conv_width=4 needs position='conv', not position='rope'"),
        ({"position": "conv", "conv_width": 0}, "conv_width=0 must be at least 1"),
        ({"position": "alibi"}, "position='alibi' must be one of rope, conv, decay, none"),
        ({"gate": "swish"}, "gate='swish' must be one of none, silu, norm"),
        ({"backend": "cuda"}, "backend='cuda' must be one of auto, torch"),
        ({"rope_layout": "halves"}, "rope_layout='halves' must be one of half, interleaved"),
        ({"dt_init": "zero"}, "dt_init='zero' must be one of mamba2, paper"),
        ({"groups": "mixed"}, "groups='mixed' must be one of interleaved, tiled"),
    ],
)
def test_layer_refuses(unchecked, options, message):
    with pytest.raises(ValueError, match=message):
        SSD(**({"d_model": 12, "n_heads": 4} | options))
