"""What an SSD layer keeps: numbers by loops, decays and ranks that were planted, every variant."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.base import NotApplicableError, Subject
from analysis.mixing import Mixer
from analysis.record import to_plain
from analysis.state_space import rank as state_rank
from analysis.state_space import words as state_space
from analysis.state_space.rank import Spectrum
from analysis.state_space.recurrence import Recurrence, effective_rank, rank
from analysis.state_space.results import QUANTITIES, Contexts, Magnitudes, Memory, Roles
from lab.config import ModelConfig, TrainConfig
from lab.layers.ssd import SSD
from lab.models import build
from lab.ops.ssd_forms import scan_states, state_writes
from lab.training.runs import Run
from tasks.mqar import MQAR
from tests.ssd_variants import moved, normal

TASK = MQAR(seq_len=16, vocab_size=32)

VARIANTS: list[dict[str, Any]] = [
    {},
    {"position": "none"},
    {"position": "decay", "n_groups": 1, "skip": False},
    {"position": "conv", "gate": "norm", "d_inner": 24},
    {"groups": "tiled", "dt_init": "paper"},
    {"n_groups": 4, "gate": "silu"},
]
every_variant = pytest.mark.parametrize("options", VARIANTS, ids=str)


def recurrence(module: SSD, x: Tensor | None = None) -> Recurrence:
    with torch.no_grad():
        return Recurrence.of(Mixer(0, module, normal(2, 11, 12) if x is None else x))


def without_skip(module: SSD, x: Tensor) -> Tensor:
    """Return M̃, whole."""
    matrix = module.matrix(x)
    return (
        matrix
        if module.D is None
        else matrix - torch.diag_embed(module.D[:, None].expand(-1, x.shape[1]))
    )


def constant(a: float, dt: float = 1.0, **options: Any) -> SSD:
    """Return a layer that decays by a at every token, whatever the tokens."""
    module = moved(position="decay", **options)
    with torch.no_grad():
        assert module.A_log is not None
        module.A_log.fill_(math.log(-a / dt))
        module.dt_proj.weight.zero_()
        module.dt_proj.bias.fill_(math.log(math.expm1(dt)))
    return module


@every_variant
@pytest.mark.parametrize("block", [2**22, 50])
@torch.no_grad()
def test_contexts_are_the_smallest_windows(options, block, monkeypatch):
    monkeypatch.setattr("analysis.mixing.BLOCK_ENTRIES", block)
    module = moved(**options)
    found = recurrence(module)
    matrix = without_skip(module, found.mixer.x).float()
    for row in range(2):
        contexts = found.contexts(row)
        for h in range(4):
            for i in range(11):
                size = matrix[row, h, i, : i + 1].abs().tolist()
                window = next(
                    w for w in range(1, i + 2) if sum(size[i + 1 - w :]) >= 0.9 * sum(size)
                )
                assert contexts[h, i] == window


@every_variant
@torch.no_grad()
def test_singular_values_are_those_of_the_block(options):
    module = moved(**options)
    found = recurrence(module)
    matrix = without_skip(module, found.mixer.x)
    for split in (1, 5, 10):
        block = matrix[:, :, split:, :split]
        sigma = found.singular_values(split)
        expected = torch.linalg.svdvals(block)
        k = min(sigma.shape[-1], expected.shape[-1])
        torch.testing.assert_close(sigma[..., :k], expected[..., :k], rtol=1e-9, atol=1e-12)
        assert not (sigma[..., k:].abs() > 1e-12).any()
        assert not (expected[..., k:].abs() > 1e-12).any()
        # The law: what the state carries is at most as wide as the state.
        assert (rank(sigma, (11 - split, split)) <= min(6, split, 11 - split)).all()


@every_variant
@torch.no_grad()
def test_shares_of_content_and_decay_by_loops(options, monkeypatch):
    monkeypatch.setattr("analysis.state_space.recurrence.BLOCK_ENTRIES", 100)
    module = moved(**options)
    found = recurrence(module)
    for h in range(4):
        content, decay = [], []
        for i in range(11):
            for j in range(i):
                b, c = found.B[1, j], found.C[1, i]
                group = h // (4 // len(b))
                content.append(math.log(abs(float(b[group] @ c[group]))))
                decay.append(sum(float(found.log_decay[1, k, h]) for k in range(j + 1, i + 1)))
        c, d = np.array(content), np.array(decay)
        parts = [c.var(), d.var(), 2 * ((c - c.mean()) * (d - d.mean())).mean()]
        np.testing.assert_allclose(sum(parts), (c + d).var())
        shares = found.content_and_decay(1)[h].numpy()
        # The scores are of one precision here and in the code, summed in another order.
        np.testing.assert_allclose(shares, np.array(parts) / (c + d).var(), rtol=1e-6, atol=1e-9)
        assert shares.sum() == pytest.approx(1.0)


@every_variant
@torch.no_grad()
def test_writes_and_reads_are_the_recurrences(options):
    module = moved(**options)
    found = recurrence(module)
    B = found.B.repeat_interleave(4 // found.B.shape[2], dim=2)
    C = found.C.repeat_interleave(4 // found.C.shape[2], dim=2)
    writes = state_writes(found.values, found.dt, B)
    torch.testing.assert_close(found.writes, writes.flatten(3).norm(dim=-1))
    states = scan_states(writes, found.log_decay)
    torch.testing.assert_close(found.reads, torch.einsum("bthpn,bthn->bthp", states, C))
    torch.testing.assert_close(
        without_skip(module, found.mixer.x) @ module.values(found.mixer.x),
        found.reads.transpose(1, 2),
    )


@pytest.mark.parametrize("a", [-0.01, -0.5, -3.0])
def test_a_known_decay_has_its_half_life(a):
    found = recurrence(constant(a))
    torch.testing.assert_close(
        found.half_lives, torch.full((4,), math.log(2) / -a, dtype=torch.float64)
    )


def test_without_decay_nothing_is_forgotten():
    found = recurrence(moved(position="none"))
    assert (found.half_lives == math.inf).all()
    assert (found.content_and_decay(0)[:, 0] == 1).all()
    assert (found.content_and_decay(0)[:, 1:] == 0).all()


def same_everywhere(module: SSD) -> Recurrence:
    """Return what a layer does to a token that is repeated: B, C and x are constant."""
    return recurrence(module, normal(1, 1, 12).expand(1, 40, 12))


@pytest.mark.parametrize("a", [-0.05, -0.7])
def test_a_known_decay_has_its_context(a):
    """Of Σ e^{a·k}, k < i + 1, a window of w holds (1 − e^{aw}) / (1 − e^{a(i+1)})."""
    contexts = same_everywhere(constant(a)).contexts(0)[0].tolist()
    for i, context in enumerate(contexts):
        held = [(1 - math.exp(a * w)) / (1 - math.exp(a * (i + 1))) for w in range(1, i + 2)]
        assert context == 1 + next(w for w, share in enumerate(held) if share >= 0.9 - 1e-9)


def test_uniform_rows_have_the_uniform_context():
    with torch.no_grad():
        module = moved(position="none")
    contexts = same_everywhere(module).contexts(0)[0].tolist()
    assert contexts == [math.ceil(round(0.9 * (i + 1), 6)) for i in range(40)]


def test_one_direction_has_rank_one_and_all_alike_have_full_rank():
    sigma = same_everywhere(constant(-0.1)).singular_values(20)
    assert (rank(sigma, (20, 20)) == 1).all()
    torch.testing.assert_close(effective_rank(sigma), torch.ones(1, 4, dtype=torch.float64))
    alike = torch.full((3, 5), 0.7)
    assert (rank(alike, (9, 9)) == 5).all()
    torch.testing.assert_close(effective_rank(alike), torch.full((3,), 5.0))


@pytest.mark.parametrize("kept", [1, 3])
def test_planted_directions_are_counted(kept):
    """B lives in `kept` of the state's channels."""
    module = constant(-0.1)
    with torch.no_grad():
        weight = module.B_proj.weight.unflatten(0, (2, 6))
        weight[:, kept:] = 0
    sigma = recurrence(module).singular_values(5)
    assert (rank(sigma, (6, 5)) == kept).all()
    assert (effective_rank(sigma) <= kept + 1e-9).all()


def test_scale_changes_no_rank_share_or_context():
    module = moved()
    before = recurrence(module)
    with torch.no_grad():
        module.B_proj.weight.mul_(-7)
        module.C_proj.weight.mul_(0.3)
    after = recurrence(module)
    assert torch.equal(after.contexts(0), before.contexts(0))
    torch.testing.assert_close(after.content_and_decay(0), before.content_and_decay(0))
    sigmas = after.singular_values(5), before.singular_values(5)
    torch.testing.assert_close(effective_rank(sigmas[0]), effective_rank(sigmas[1]))
    torch.testing.assert_close(sigmas[0], 2.1 * sigmas[1])


def subject(stack: str = "SM AM SM", **options: Any) -> Subject:
    model = build(
        stack,
        vocab_size=32,
        d_model=16,
        n_heads=2,
        options={"S.d_state": 4} | {f"S.{name}": value for name, value in options.items()},
    )
    return Subject(TASK, model.eval(), TASK.batch(split="test", size=4))


@pytest.mark.parametrize(
    "options",
    [{}, {"position": "none"}, {"position": "conv", "gate": "norm"}, {"n_groups": 2}],
    ids=str,
)
def test_results_are_the_layers_and_can_be_shown(options):
    found = subject(**options)
    memory, contexts, roles, *magnitudes = state_space.measure(found)
    [spectrum] = state_rank.measure(found)
    assert isinstance(memory, Memory)
    assert isinstance(contexts, Contexts)
    assert isinstance(roles, Roles)
    assert isinstance(spectrum, Spectrum)
    assert memory.layers.tolist() == [0, 0, 2, 2]
    assert memory.heads.tolist() == [0, 1, 0, 1]
    assert memory.initial is None
    assert (memory.half_life == np.inf).all() == (options.get("position") == "none")
    assert [m.layer for m in magnitudes if isinstance(m, Magnitudes)] == [0, 2]
    assert (spectrum.rank <= spectrum.bound).all()
    assert (spectrum.effective_rank <= spectrum.rank + 1e-3).all()
    assert spectrum.splits.tolist() == list(range(1, 16))
    assert spectrum.bound.tolist() == [[min(m, 16 - m, 4)] * 4 for m in range(1, 16)]
    np.testing.assert_allclose(memory.content + memory.decay + memory.covariance, 1.0)
    for module, results in (
        (state_space, [memory, contexts, roles, *magnitudes]),
        (state_rank, [spectrum]),
    ):
        for result in results:
            figure = module.draw(result)
            assert figure is not None
            assert len(figure.data) > 0
            words = module.describe(result)
            assert words.says.endswith(".")
            assert "nan" not in words.says
            assert " inf" not in words.says
            to_plain(result)


def test_means_by_role_are_the_loop():
    found = subject()
    roles = state_space.measure(found)[2]
    assert isinstance(roles, Roles)
    assert roles.role_names == ("key", "value", "query", "filler")
    with torch.no_grad():
        embedded = found.model.embed(found.batch.inputs)
        norm = found.model.get_submodule("blocks.0.norm_mixer")
        module = found.model.get_submodule("blocks.0.mixer")
        assert isinstance(module, SSD)
        first = Recurrence.of(Mixer(0, module, norm(embedded)))
    seen: dict[tuple[int, int], list[float]] = {}
    for b in range(4):
        for t in range(16):
            for h in range(2):
                role = int(found.batch.roles[b, t])
                seen.setdefault((role, h), []).append(float(first.writes[b, t, h]))
    for (role, h), values in seen.items():
        assert roles.means[2, role, h] == pytest.approx(np.mean(values), rel=1e-5)
        assert roles.means[1, role, h] <= 1


def test_a_role_that_is_written_is_named():
    means = np.ones((4, 2, 1))
    means[2, 1, 0] = 4.0
    names = ("key", "value")
    found = Roles(np.array([0]), np.array([0]), names, QUANTITIES, means, 4)
    assert state_space.describe(found).says == (
        "Head 0.0 writes 4 times as much at value tokens as at key ones."
    )
    even = Roles(np.array([0]), np.array([0]), names, QUANTITIES, means**0, 4)
    assert state_space.describe(even).says.startswith("No head tells roles apart")


@pytest.mark.parametrize(
    ("others", "ends"),
    [
        (0, "as at key ones."),
        (1, "as at key ones; so does 1 other head, by 1.5 times or more."),
        (2, "as at key ones; so do 2 other heads, by 1.5 times or more."),
    ],
)
def test_every_other_head_that_tells_roles_apart_is_counted(others, ends):
    means = np.ones((4, 2, 4))
    means[2, 1, : 1 + others] = 4.0
    found = Roles(np.zeros(4, int), np.arange(4), ("key", "value"), QUANTITIES, means, 4)
    assert state_space.describe(found).says.endswith(ends)


def memory(*half_lives: float, initial: Memory | None = None) -> Memory:
    n = len(half_lives)
    context, share = np.full(n, 3.0), np.full(n, 1 / 3)
    heads = np.arange(n)
    return Memory(
        heads * 0, heads, np.array(half_lives), context, share, share, share, 9.0, 4, initial
    )


@pytest.mark.parametrize(
    ("half_lives", "starts"),
    [
        ((math.inf, math.inf), "No head forgets: there is no decay;"),
        (
            (2.0, math.inf),
            "The half-life of head 0.0 is 2 tokens; the other head keeps without end",
        ),
        ((math.inf, 2.0, math.inf), "The half-life of head 0.1 is 2 tokens; 2 heads keep without"),
        ((8.0, math.inf, 2.0), "Half-lives go from 2 tokens (head 0.2) to 8 tokens (head 0.0); "),
        ((2.0,), "The half-life is 2 tokens; its effective"),
    ],
)
def test_heads_without_decay_are_said_to_keep_without_end(half_lives, starts):
    found = memory(*half_lives)
    words = state_space.describe(found)
    assert words.says.startswith(starts)
    assert "inf" not in words.says
    before = memory(*[math.inf] * len(half_lives))
    again = state_space.describe(memory(*half_lives, initial=before)).says
    assert "inf" not in again
    assert ("without end at step 0" in again) == np.isfinite(half_lives).any()
    assert state_space.draw(found)


def test_contexts_name_the_narrowest_and_the_widest_head():
    found = Contexts(
        np.zeros(2, int),
        np.arange(2),
        np.array([0, 7, 15]),
        np.array([[1.0, 4.0, 4.0], [1.0, 8.0, 15.0]]),
        np.array([1.0, 8.0, 15.0]),
        4,
    )
    assert state_space.describe(found).says == (
        "At the last position, 15, 90 % of a row's magnitudes lie in the latest 4 (head 0.0) to "
        "15 tokens (head 0.1), beside 15 of a uniform matrix."
    )
    figure = state_space.draw(found)
    assert figure
    traces: Any = list(figure.select_traces())
    fig = {trace.name: trace.y.tolist() for trace in traces}
    assert fig["head 0.0"] == [1.0, 4.0, 4.0]
    assert fig["uniform"] == [1.0, 8.0, 15.0]


def test_magnitudes_end_at_a_floor():
    found = subject("SM")
    result = state_space.measure(found)[3]
    assert isinstance(result, Magnitudes)
    picture = result.shown.picture
    assert picture is not None
    module = found.model.get_submodule("blocks.0.mixer")
    assert isinstance(module, SSD)
    with torch.no_grad():
        norm = found.model.get_submodule("blocks.0.norm_mixer")
        matrix = without_skip(module, norm(found.model.embed(found.batch.inputs[:1])))[0]
    assert result.largest == pytest.approx(math.log10(float(matrix.abs().max())), rel=1e-5)
    assert result.floor >= result.largest - state_space.DECADES
    for h, i in np.ndindex(2, 16):
        for j in range(16):
            if j > i:
                assert np.isnan(picture.weights[h, i, j])
                continue
            size = math.log10(max(abs(float(matrix[h, i, j])), 1e-38))
            shown = max(size, result.floor)
            assert picture.weights[h, i, j] == pytest.approx(shown, abs=1e-3)
    figure = state_space.draw(result)
    assert figure is not None
    layout = figure.to_dict()["layout"]
    colors = layout["coloraxis"]
    assert (colors["cmin"], colors["cmax"]) == (result.floor, result.largest)
    assert layout["meta"]["value"] == "log₁₀|M̃|"
    assert len(layout["meta"]["tokens"]) == 16


def test_a_run_is_compared_with_its_initial_weights(tmp_path):
    model = ModelConfig.from_dict({"stack": "SM", "d_model": 16, "options": {"S.d_state": 4}})
    run = Run(tmp_path / "run", TASK, model, TrainConfig())
    trained = run.load_model(0)
    with torch.no_grad():
        decays = trained.get_parameter("blocks.0.mixer.A_log")
        before = decays.clone()
        decays.add_(math.log(2))
    batch = TASK.batch(split="test", size=4)
    memory = state_space.measure(Subject(TASK, trained, batch, step=5, run=run))[0]
    [spectrum] = state_rank.measure(Subject(TASK, trained, batch, step=5, run=run))
    assert isinstance(memory, Memory)
    assert memory.initial is not None
    # Twice the rate is half the half-life, up to rounding in fp32.
    np.testing.assert_allclose(2 * memory.half_life, memory.initial.half_life, rtol=1e-6)
    assert "at step 0" in state_space.describe(memory).says
    assert not np.isnan(spectrum.initial_effective_rank).any()
    figure = state_space.draw(memory)
    assert figure is not None
    assert {trace["name"] for trace in figure.to_dict()["data"]} >= {"now", "step 0"}
    decays.data.copy_(before)
    start = state_space.measure(Subject(TASK, trained, batch, step=0, run=run))[0]
    assert isinstance(start, Memory)
    assert start.initial is None
    np.testing.assert_array_equal(start.half_life, memory.initial.half_life)


def test_a_model_without_states_has_none():
    model = build("AM", vocab_size=32, d_model=16)
    found = Subject(TASK, model, TASK.batch(size=1))
    for module in (state_space, state_rank):
        with pytest.raises(NotApplicableError, match="no block has an SSD mixer"):
            module.measure(found)
