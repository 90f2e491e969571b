"""Any causal model of transformers is certified by the name of its configuration."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.certify_settings import QUICK
from lab.laws import assert_lawful
from lab.laws.certification import Certification
from lab.laws.loading import SmallModel, load
from lab.peers import load as load_peer

SHORT = (2, 7)


def build(name: str, **options: object) -> Any:
    transformers = load_peer("transformers")
    return SmallModel(getattr(transformers, name))(**options)


@pytest.mark.parametrize(
    "name", ["LlamaConfig", "GPTNeoConfig", "DeepseekV3Config", "Mamba2Config", "Gemma3Config"]
)
@torch.no_grad()
def test_a_small_model_reads_tokens(name: str):
    model = build(name)
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) < 300_000
    logits = model(input_ids=torch.arange(3, 12)[None]).logits
    assert logits.shape == (1, 9, 64)
    assert logits.isfinite().all()


def test_a_small_model_has_a_layer_of_each_kind():
    config = load_peer("transformers.models.inkling.configuration_inkling").InklingTextConfig
    model: Any = SmallModel(config)()
    assert set(model.config.layer_types) == {"hybrid", "hybrid_sliding"}


@pytest.mark.parametrize(
    ("module", "name", "kinds"),
    [
        ("cohere_compass", "CohereCompassTextConfig", {"sliding_attention", "full_attention"}),
        ("dots3_note", "Dots3NoteTextConfig", {"indexed_attention", "sliding_attention"}),
        ("qwen4_exp", "Qwen4ExpTextConfig", {"linear_attention", "indexed_attention"}),
    ],
)
def test_one_whose_sizes_have_other_names_is_small(module: str, name: str, kinds: set[str]):
    configuration = load_peer(f"transformers.models.{module}.configuration_{module}")
    model: Any = SmallModel(getattr(configuration, name))()
    assert set(model.config.layer_types) == kinds
    assert sum(p.numel() for p in model.parameters()) < 500_000


def test_windows_of_a_small_deepseek_v4_are_short_enough_to_be_compressed():
    rates = build("DeepseekV4Config").config.compress_rates
    assert max(rates.values()) <= 8


@pytest.mark.parametrize("name", ["MixtralConfig", "GptOssConfig", "DeepseekV3Config"])
@torch.no_grad()
def test_experts_compute_in_fp64(name: str):
    model = build(name).double()
    assert model(input_ids=torch.arange(3, 12)[None]).logits.dtype == torch.float64


@pytest.mark.parametrize("name", ["BertConfig", "XLMConfig"])
def test_an_encoder_is_built_as_a_decoder(name: str):
    assert_lawful(name, laws=["causal"], lengths=SHORT, options={"num_hidden_layers": 1})


def test_options_take_precedence_over_the_small_sizes():
    assert build("LlamaConfig", num_hidden_layers=1, vocab_size=96).config.vocab_size == 96


def test_one_that_stays_large_is_refused_with_its_largest_parameter():
    with pytest.raises(ValueError, match=r"encoder_hash_tok_embedding.weight is \[3000012, 32\]"):
        build("BltConfig")


def test_a_name_alone_is_a_target():
    assert isinstance(load("LlamaConfig"), SmallModel)
    assert isinstance(load("transformers:LlamaConfig"), SmallModel)
    assert_lawful("LlamaConfig", laws=["causal"], lengths=SHORT, options={"num_hidden_layers": 1})


def test_its_program_builds_the_same_model():
    settings = replace(QUICK, lengths=SHORT, conditions=QUICK.conditions[:1])
    found = Certification("ProphetNetConfig", settings).judge("causal")
    assert found.verdict == "fails"
    assert found.snippet is not None
    assert "import lab" not in found.snippet
    assert "from lab" not in found.snippet
    with pytest.raises(SystemExit) as ended:
        exec(compile(found.snippet, "program", "exec"), {"__name__": "__main__"})
    assert ended.value.code is True


def test_a_model_that_does_not_name_its_table_is_judged():
    def name_none() -> None:
        raise NotImplementedError("not auto-handled")

    model = build("LlamaConfig", num_hidden_layers=1)
    model.get_input_embeddings = name_none
    certification = Certification(model, replace(QUICK, lengths=SHORT))
    assert "embedded by model.embed_tokens" in certification.notes[0]
    assert certification.judge("causal").verdict == "holds"
