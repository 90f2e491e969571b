"""What an SSD layer keeps: the findings of a model, in numbers, words and figures."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from analysis import state_space
from analysis.base import NotApplicableError, Subject
from analysis.mixing import Mixer
from analysis.plain import to_plain
from analysis.state_space import rank as state_rank
from analysis.state_space.contexts import Contexts
from analysis.state_space.magnitudes import DECADES, Magnitudes
from analysis.state_space.memory import StateMemory
from analysis.state_space.recurrence import Recurrence
from analysis.state_space.role_means import QUANTITIES, RoleMeans
from analysis.state_space.spectrum import StateSpectrum
from lab.config import ModelConfig, TrainConfig
from lab.layers.ssd import SSD
from lab.models import build
from lab.training.run import Run
from tasks.mqar import MQAR
from tests.ssd_variants import matrix_without_skip

TASK = MQAR(seq_len=16, vocab_size=32)


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
    assert isinstance(memory, StateMemory)
    assert isinstance(contexts, Contexts)
    assert isinstance(roles, RoleMeans)
    assert isinstance(spectrum, StateSpectrum)
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
            fig = module.draw(result)
            assert fig is not None
            assert len(fig.data) > 0
            words = module.describe(result)
            assert words.says.endswith(".")
            assert "nan" not in words.says
            assert " inf" not in words.says
            to_plain(result)


def test_means_by_role_are_the_loop():
    found = subject()
    roles = state_space.measure(found)[2]
    assert isinstance(roles, RoleMeans)
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
    found = RoleMeans(np.array([0]), np.array([0]), names, QUANTITIES, means, 4)
    assert found.describe().says == (
        "Head 0.0 writes 4 times as much at value tokens as at key ones."
    )
    even = RoleMeans(np.array([0]), np.array([0]), names, QUANTITIES, means**0, 4)
    assert even.describe().says.startswith("No head distinguishes roles")


@pytest.mark.parametrize(
    ("others", "ends"),
    [
        (0, "as at key ones."),
        (1, "as at key ones; so does 1 other head, by 1.5 times or more."),
        (2, "as at key ones; so do 2 other heads, by 1.5 times or more."),
    ],
)
def test_every_other_head_that_distinguishes_roles_is_counted(others, ends):
    means = np.ones((4, 2, 4))
    means[2, 1, : 1 + others] = 4.0
    found = RoleMeans(np.zeros(4, int), np.arange(4), ("key", "value"), QUANTITIES, means, 4)
    assert found.describe().says.endswith(ends)


def memory(*half_lives: float, initial: StateMemory | None = None) -> StateMemory:
    n = len(half_lives)
    context, share = np.full(n, 3.0), np.full(n, 1 / 3)
    heads = np.arange(n)
    return StateMemory(
        heads * 0, heads, np.array(half_lives), context, share, share, share, 9.0, 4, initial
    )


@pytest.mark.parametrize(
    ("half_lives", "starts"),
    [
        ((math.inf, math.inf), "No head forgets: there is no decay;"),
        (
            (2.0, math.inf),
            "The half-life of head 0.0 is 2 tokens; the other head never forgets",
        ),
        ((math.inf, 2.0, math.inf), "The half-life of head 0.1 is 2 tokens; 2 heads never forget"),
        ((8.0, math.inf, 2.0), "Half-lives go from 2 tokens (head 0.2) to 8 tokens (head 0.0); "),
        ((2.0,), "The half-life is 2 tokens; its effective"),
    ],
)
def test_heads_without_decay_are_said_never_to_forget(half_lives, starts):
    found = memory(*half_lives)
    words = found.describe()
    assert words.says.startswith(starts)
    assert "inf" not in words.says
    before = memory(*[math.inf] * len(half_lives))
    again = memory(*half_lives, initial=before).describe().says
    assert "inf" not in again
    assert ("endless at step 0" in again) == np.isfinite(half_lives).any()
    assert found.draw()


def test_contexts_name_the_narrowest_and_the_widest_head():
    found = Contexts(
        np.zeros(2, int),
        np.arange(2),
        np.array([0, 7, 15]),
        np.array([[1.0, 4.0, 4.0], [1.0, 8.0, 15.0]]),
        np.array([1.0, 8.0, 15.0]),
        4,
    )
    assert found.describe().says == (
        "At the last position, 15, 90 % of a row's magnitudes lie in the latest 4 (head 0.0) to "
        "15 tokens (head 0.1), compared with 15 for a uniform matrix."
    )
    traces: Any = list(found.draw().select_traces())
    lines = {trace.name: trace.y.tolist() for trace in traces}
    assert lines["head 0.0"] == [1.0, 4.0, 4.0]
    assert lines["uniform"] == [1.0, 8.0, 15.0]


def test_magnitudes_end_at_a_floor():
    found = subject("SM")
    result = state_space.measure(found)[3]
    assert isinstance(result, Magnitudes)
    picture = result.shown.picture
    module = found.model.get_submodule("blocks.0.mixer")
    assert isinstance(module, SSD)
    with torch.no_grad():
        norm = found.model.get_submodule("blocks.0.norm_mixer")
        matrix = matrix_without_skip(module, norm(found.model.embed(found.batch.inputs[:1])))[0]
    assert result.largest == pytest.approx(math.log10(float(matrix.abs().max())), rel=1e-5)
    assert result.floor >= result.largest - DECADES
    for h, i in np.ndindex(2, 16):
        for j in range(16):
            if j > i:
                assert np.isnan(picture.weights[h, i, j])
                continue
            size = math.log10(max(abs(float(matrix[h, i, j])), 1e-38))
            shown = max(size, result.floor)
            assert picture.weights[h, i, j] == pytest.approx(shown, abs=1e-3)
    layout = result.draw().to_dict()["layout"]
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
    assert isinstance(memory, StateMemory)
    assert memory.initial is not None
    # Twice the rate is half the half-life, up to rounding in fp32.
    np.testing.assert_allclose(2 * memory.half_life, memory.initial.half_life, rtol=1e-6)
    assert "at step 0" in memory.describe().says
    assert not np.isnan(spectrum.initial_effective_rank).any()
    assert {trace["name"] for trace in memory.draw().to_dict()["data"]} >= {"now", "step 0"}
    decays.data.copy_(before)
    start = state_space.measure(Subject(TASK, trained, batch, step=0, run=run))[0]
    assert isinstance(start, StateMemory)
    assert start.initial is None
    np.testing.assert_array_equal(start.half_life, memory.initial.half_life)


def test_a_model_without_states_has_none():
    model = build("AM", vocab_size=32, d_model=16)
    found = Subject(TASK, model, TASK.batch(size=1))
    for module in (state_space, state_rank):
        with pytest.raises(NotApplicableError, match="no block has the lab's SSD mixer"):
            module.measure(found)
