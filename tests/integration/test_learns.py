"""The small recall job: recall is learned, and the mechanism is there to see."""

from analysis.links import find_links
from analysis.matrices import measure_mass
from analysis.mixing import collect_mixers
from lab.config import ModelConfig, Runtime, TrainConfig, get_protocol_defaults
from lab.training.experiment import carry_out
from lab.training.run import Run
from tasks.mqar import MQAR


def test_hard_mqar_is_solved_and_read_from_the_value_positions(tmp_path):
    values = get_protocol_defaults("lab", seq_len=32, vocab_size=64, d_model=64)
    model = ModelConfig(logit_scale=values.pop("logit_scale"))
    run = Run(
        tmp_path / "run",
        MQAR(seq_len=32, vocab_size=64),
        model,
        TrainConfig(**{**values, "batch_size": 32, "max_steps": 1500, "test_rows": 256}),
    )
    result = carry_out(run, Runtime(device="cpu"))
    assert result["stopped"] == "solved"
    assert result["accuracy"] >= 0.99
    assert result["baselines"]["oracle"] == 1.0
    assert result["accuracy"] > result["baselines"]["most recent match"]

    state = run.load_state()
    batch = run.task.batch(split="test", size=1)
    first, second = collect_mixers(state.model, batch)
    links = find_links(batch)  # untrained: at most 0.19 and 0.05
    assert measure_mass(first, links).written[0] > 0.3
    assert measure_mass(second, links).on_value[0] > 0.5
