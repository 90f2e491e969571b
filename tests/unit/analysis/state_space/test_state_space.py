"""What an SSD layer keeps: the findings of a model, in numbers, words and figures."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from analysis import state_space
from analysis.base import NotApplicableError, Subject
from analysis.mixing import BlockMixer
from analysis.state_space import DECADES, Magnitudes, RoleMeans, StateMemory
from analysis.state_space import rank as state_rank
from analysis.state_space.rank import StateSpectrum
from analysis.state_space.recurrence import SSDRecurrence
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


@pytest.mark.parametrize("options", [{"n_groups": 2}, {"position": "none"}], ids=str)
def test_results_are_the_layers(options):
    found = subject(**options)
    memory, _, _, *magnitudes = state_space.measure(found)
    [spectrum] = state_rank.measure(found)
    assert isinstance(memory, StateMemory)
    assert isinstance(spectrum, StateSpectrum)
    assert memory.layers.tolist() == [0, 0, 2, 2]
    assert memory.heads.tolist() == [0, 1, 0, 1]
    assert memory.initial is None
    assert (memory.half_life == np.inf).all() == (options.get("position") == "none")
    assert [m.layer for m in magnitudes if isinstance(m, Magnitudes)] == [0, 2]
    assert spectrum.splits.tolist() == list(range(1, 16))
    assert spectrum.bound.tolist() == [[min(m, 16 - m, 4)] * 4 for m in range(1, 16)]


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
        first = SSDRecurrence.of(BlockMixer(0, module, norm(embedded)))
    seen: dict[tuple[int, int], list[float]] = {}
    for b in range(4):
        for t in range(16):
            for h in range(2):
                role = int(found.batch.roles[b, t])
                seen.setdefault((role, h), []).append(float(first.writes[b, t, h]))
    for (role, h), values in seen.items():
        assert roles.means[2, role, h] == pytest.approx(np.mean(values), rel=1e-5)
        assert roles.means[1, role, h] <= 1


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
    layout = result.figure().to_dict()["layout"]
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
    assert not np.isnan(spectrum.initial_effective_rank).any()
    assert {trace["name"] for trace in memory.figure().to_dict()["data"]} >= {"now", "step 0"}
    decays.data.copy_(before)
    start = state_space.measure(Subject(TASK, trained, batch, step=0, run=run))[0]
    assert isinstance(start, StateMemory)
    assert start.initial is None
    np.testing.assert_array_equal(start.half_life, memory.initial.half_life)


def test_layers_of_several_kinds_stand_side_by_side():
    found = subject("SM gdn+M retnet+M")
    memory, contexts, roles, *magnitudes = state_space.measure(found)
    [spectrum] = state_rank.measure(found)
    assert isinstance(memory, StateMemory)
    assert memory.layers.tolist() == spectrum.layers.tolist() == [0, 0, 1, 1, 2, 2]
    assert np.isnan(memory.decay).tolist() == [False] * 2 + [True] * 4
    assert isinstance(roles, RoleMeans)
    assert np.isnan(roles.means[0]).all(0).tolist() == [False] * 2 + [True] * 4
    assert not np.isnan(roles.means[1:]).any()
    assert [m.title.split(" · ")[1] for m in magnitudes] == ["SSD", "GatedDeltaNet", "Retention"]
    for finding in (memory, contexts, roles, spectrum):
        assert "nan" not in finding.says
        finding.figure()
    assert spectrum.bound[7].tolist() == [4, 4, 8, 8, 8, 8]


def test_a_model_without_states_has_none():
    model = build("AM", vocab_size=32, d_model=16)
    found = Subject(TASK, model, TASK.batch(size=1))
    for module in (state_space, state_rank):
        with pytest.raises(NotApplicableError, match="no block has a mixer with a state"):
            module.measure(found)
