"""The SSD layer: its variants against their definitions, hooks, what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.hooks import hook_points, hooks
from lab.layers.ssd import SSD
from lab.ops.ssd import BACKENDS, SSDInputs
from lab.ops.ssd_forms import repeat_groups, ssd_recurrent
from tests.normal import draw_normal
from tests.ssd_variants import HOOKS, every_variant, layer, moved


@every_variant
@pytest.mark.parametrize(
    "rows", [slice(0, 5), slice(4, 9), slice(6, 7), slice(9, None), slice(3, 3)]
)
def test_some_rows_of_the_matrix_are_those_of_the_whole(options, rows):
    mixer, x = moved(**options), draw_normal(2, 13, 12)
    some = mixer.matrix(x, rows=rows)
    # Decays are summed in another order: fp64's rounding.
    torch.testing.assert_close(some, mixer.matrix(x)[:, :, rows], rtol=1e-9, atol=1e-12)


def rates(mixer: SSD) -> Tensor:
    """Return A."""
    assert mixer.A_log is not None
    return -mixer.A_log.exp()


def inputs(mixer: SSD, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, dt, B and C as their projections give them."""
    B, C = (f(x).unflatten(-1, (2, 6)) for f in (mixer.B_proj, mixer.C_proj))
    return mixer.x_proj(x).unflatten(-1, (4, -1)), F.softplus(mixer.dt_proj(x)), B, C


def test_without_a_position_it_is_linear_attention():
    mixer, x = moved(position="none"), draw_normal(2, 13, 12)
    assert mixer.A_log is None
    assert mixer.D is not None
    values, dt, B, C = inputs(mixer, x)
    scores = torch.einsum("bthn,bshn->bhts", repeat_groups(C, 4), repeat_groups(B, 4)).tril()
    z = torch.einsum("bhts,bsh,bshp->bthp", scores, dt, values) + mixer.D[:, None] * values
    torch.testing.assert_close(mixer(x), mixer.out_proj(z.flatten(-2)))


def test_convolution_and_gated_norm_make_mamba2():
    mixer, x = moved(position="conv", gate="norm", d_inner=24), draw_normal(2, 13, 12)
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


@pytest.mark.parametrize(("n_groups", "same"), [(1, True), (2, False), (4, True)])
def test_tiled_groups_differ_between_one_group_and_one_a_head(n_groups, same):
    """Erratum S3."""
    x = draw_normal(1, 6, 12)
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
    long = SSD(64, 64, d_state=2, dt_init="long")
    dt = torch.nn.functional.softplus(long.dt_proj.bias)
    torch.testing.assert_close(dt, torch.full((64,), 0.1))
    per_token = dt * rates(long)
    torch.testing.assert_close(per_token, torch.full((64,), -1 / 1024))
    short = SSD(64, 64, d_state=2, memory=2.5)
    per_token = torch.nn.functional.softplus(short.dt_proj.bias) * rates(short)
    torch.testing.assert_close(per_token, torch.full((64,), -1 / 2.5))
    printed = SSD(64, 64, d_state=2, dt_init="paper")
    assert printed.dt_proj.bias is None
    torch.testing.assert_close(-rates(printed), torch.arange(1.0, 65))


@pytest.mark.parametrize("options", [{}, {"position": "conv", "gate": "norm"}], ids=str)
def test_half_precision_layers(options):
    mixer, x = layer(**options), draw_normal(2, 40, 12)
    expected = mixer(x)
    assert (mixer.bfloat16()(x.bfloat16()) - expected).abs().max() < 0.05 * expected.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        actual = mixer.float()(x.float())
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()


def test_hook_points_and_what_passes_them():
    mixer, x, seen = layer(), draw_normal(2, 13, 12), {}
    assert set(hook_points(mixer)) == {f"hook_{name}" for name in HOOKS}
    with hooks(mixer, [(None, lambda z, point: seen.__setitem__(point.name, z))]):
        y = mixer(x)
    torch.testing.assert_close(y, mixer(x))
    assert (seen["hook_log_decay"] <= 0).all()
    torch.testing.assert_close(seen["hook_log_decay"], seen["hook_dt"] * rates(mixer))
    for name in ("B_pre", "B_rot", "C_pre", "C_rot"):
        assert seen[f"hook_{name}"].shape == (2, 13, 2, 6)
    values = mixer.values(x).transpose(1, 2)
    write = (seen["hook_dt"][..., None] * values)[..., None] * repeat_groups(
        seen["hook_B_rot"], 4
    ).unsqueeze(-2)
    torch.testing.assert_close(seen["hook_ssm_write"], write)
    for t in (1, 5, 13):
        inputs = (values, seen["hook_dt"], seen["hook_B_rot"], seen["hook_C_rot"])
        some, dt, B, C = (z[:, :t] for z in inputs)
        z, state = ssd_recurrent(some, dt, rates(mixer), B, C, mixer.D)
        torch.testing.assert_close(seen["hook_ssm_state"][:, t - 1], state)
        torch.testing.assert_close(seen["hook_ssm_out"][:, :t], z)


@pytest.mark.parametrize("position", ["rope", "decay", "none", "conv"])
def test_an_activation_bends_what_enters_the_recurrence(position):
    """Before a rotation, which keeps lengths, and after a convolution."""
    x = draw_normal(1, 5, 12)
    for activation in ("none", "silu"):
        bend = F.silu if activation == "silu" else lambda z: z
        module = layer(position=position, activation=activation, n_groups=1)
        inputs, _ = module._compute_inputs(x)
        joint = torch.cat([f(x) for f in (module.x_proj, module.B_proj, module.C_proj)], dim=-1)
        if module.conv is not None:
            joint = module.conv(joint)[0]
        values, B, C = bend(joint).split([12, 6, 6], dim=-1)
        torch.testing.assert_close(inputs.x.flatten(2), values)
        for found, expected in ((inputs.B, B), (inputs.C, C)):
            torch.testing.assert_close(found.norm(dim=-1)[..., 0], expected.norm(dim=-1))
            assert position == "rope" or torch.equal(found.flatten(2), expected)
    usual = layer(position=position)
    assert usual.activation == ("silu" if position == "conv" else "none")


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(
    "options", [{}, {"groups": "tiled"}, {"position": "conv"}, {"gate": "silu"}], ids=str
)
def test_what_a_hook_returns_is_used(name, options):
    mixer, x = layer(**options), draw_normal(2, 13, 12)
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


@pytest.mark.parametrize("position", ["decay", "none"])
def test_a_hook_may_put_in_any_decay(position):
    mixer, x = moved(position=position), draw_normal(2, 13, 12)
    log_decay = -draw_normal(2, 13, 4, seed=1).exp()
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


def test_sequences_are_computed_by_the_backend_named(monkeypatch):
    calls = []

    def run(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
        calls.append(inputs.x.shape[1])
        return BACKENDS["torch"].run(inputs)

    monkeypatch.setitem(BACKENDS, "counted", BACKENDS["torch"]._replace(run=run))
    mixer, x = layer(backend="counted"), draw_normal(2, 9, 12)
    torch.testing.assert_close(mixer(x), layer()(x))
    assert calls == [9]
    layer(backend="torch")(x)
    assert calls == [9]
