"""Certify many public modules: every causal model of transformers, and options of x-transformers.

`python docs/scripts/survey.py FILE` adds a line of JSON, a certificate, to a file for each module
that the file does not have yet, so it can be stopped and started again. `--of x-transformers`
takes the options of its `Decoder`.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lab.certification import RefusedError, certify_in_child, count_outcomes
from lab.certify_settings import QUICK
from lab.laws.adapters import DecodingAdapter, lend_state
from lab.peers import load

SETTINGS = replace(QUICK, lengths=(2, 19), conditions=QUICK.conditions[:1])
"""For hundreds of models: a length beyond the windows and chunks of small ones."""
MEMORY, SECONDS = 4, 60
"""Maximum memory of a model, GiB, and time for a law."""
Case = tuple[str, dict[str, Any]]
"""A target as for `lab certify`, and options of its factory."""


def list_transformers() -> dict[str, Case]:
    """List the causal architectures of transformers by name, each class once, as small models."""
    modeling = load("transformers.models.auto.modeling_auto")
    configuration = load("transformers.models.auto.configuration_auto")
    found: dict[str, str] = {}
    for name in modeling.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config = configuration.CONFIG_MAPPING[name]
        found.setdefault(f"{config.__module__}:{config.__name__}", name)
    return {name: (target, {}) for target, name in found.items()}


def list_x_transformers() -> dict[str, Case]:
    """List options of x-transformers' `Decoder`, each beside rotary positions or alone."""
    return {
        " ".join(f"{name}={value}" for name, value in each.items()) or "usual": (
            "survey:build_decoder",
            each,
        )
        for each in DECODERS
    }


class CachedDecoder(DecodingAdapter):
    """x-transformers' `Decoder`, which goes on from the intermediates that it returns."""

    def __init__(self, module: nn.Module, d_model: int):
        super().__init__(module, advance_intermediates)
        self.d_model = d_model


def advance_intermediates(adapter: Any, x: Tensor, held: Any, *_: Any) -> tuple[Tensor, Any]:
    """Return the outputs of further tokens, and the intermediates after them."""
    held = lend_state(held)
    return adapter.module(x, cache=held, cache_age=x.shape[1], return_hiddens=True)


def build_decoder(**options: Any) -> nn.Module:
    """Build a small `Decoder` of x-transformers, which decodes if it says that it can."""
    sizes = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 16, "verbose": False}
    decoder = import_module("x_transformers").Decoder(**{**sizes, **options}).eval()
    return CachedDecoder(decoder, sizes["dim"]) if decoder.can_cache_kv else decoder


DECODERS: tuple[dict[str, Any], ...] = (
    {},
    *(
        {name: True}
        for name in (
            *("attn_flash", "attn_pre_talking_heads", "attn_post_talking_heads"),
            *("attn_pre_scale_post_talking_heads", "attn_head_scale", "attn_gate_value_heads"),
            *("attn_swiglu_values", "attn_gate_values", "attn_gate_values_headwise"),
            *("attn_output_gate", "attn_output_gate_headwise", "attn_zero_init_output"),
            *("attn_hard", "attn_qk_norm", "attn_qk_rmsnorm", "attn_k_rmsnorm"),
            *("attn_value_rmsnorm", "attn_l2_distance", "attn_sigmoid", "attn_gumbel_softmax"),
            *("attn_selective", "attn_cog_signed", "attn_one_kv_head", "attn_add_zero_kv"),
            *("attn_head_learned_sink", "attn_data_dependent_alibi", "attn_use_cope"),
            *("attn_use_rel_proj_pos_bias", "attn_softclamp_logits", "attn_laser"),
            *("attn_orthog_projected_values", "attn_orthog_projected_values_per_head"),
            *("attn_onnxable", "attn_inverted_attention", "only_attn", "use_scalenorm"),
            *("use_rmsnorm", "use_dynamic_tanh", "use_derf", "use_simple_rmsnorm"),
            *("alibi_pos_bias", "rel_pos_bias", "dynamic_pos_bias", "rotary_pos_emb"),
            *("rotary_xpos", "polar_pos_emb", "weight_tie_layers", "residual_attn", "macaron"),
            *("pre_and_post_norm", "gate_residual"),
            *("orthog_residual", "mv_split_residual", "scale_residual", "depth_scale_residual"),
            *("sandwich_norm", "softclamp_output", "zero_init_branch_output", "use_layerscale"),
            *("unet_skips", "integrate_layers", "reinject_input", "add_value_residual"),
            *("ff_glu", "ff_swish", "ff_relu_squared", "ff_solu", "ff_post_act_ln", "ff_no_bias"),
            "ff_zero_init_output",
        )
    ),
    {"attn_sparse_topk": 2},
    {"attn_sparse_topk": 2, "attn_sparse_topk_straight_through": True},
    {"attn_num_mem_kv": 2},
    {"attn_num_mem_kv": 2, "rotary_pos_emb": True},
    {"attn_max_attend_past": 5},
    {"attn_max_attend_past": 5, "rotary_pos_emb": True},
    {"attn_qk_norm": True, "attn_qk_norm_groups": 2},
    {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    {"attn_kv_heads": 2},
    {"attn_value_dim_head": 8},
    {"attn_gate_values": True, "attn_gate_values_rank": 8},
    {"attn_output_gate": True, "attn_output_gate_rank": 8},
    {"attn_data_dependent_alibi": True, "attn_data_dependent_alibi_per_row": True},
    {"attn_use_cope": True, "attn_cope_talking_heads": True},
    {"attn_use_cope": True, "attn_cope_soft_onehot_pos": True},
    {"attn_use_latent_q": True, "attn_dim_latent_q": 16},
    {"attn_use_latent_kv": True, "attn_dim_latent_kv": 16},
    {
        "attn_use_latent_kv": True,
        "attn_dim_latent_kv": 16,
        "attn_latent_rope_subheads": 2,
        "rotary_pos_emb": True,
    },
    {"alibi_pos_bias": True, "alibi_num_heads": 2},
    {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": True},
    {"rotary_pos_emb": True, "rotate_num_heads": 2},
    {"rotary_pos_emb": True, "rotary_interpolation_factor": 2.0},
    {"rotary_pos_emb": True, "attn_flash": True},
    {"custom_layers": ("a", "a", "f", "f")},
    {"layers_execute_order": (0, 1, 0, 1, 2, 3)},
    {"depth": 4, "sandwich_coef": 1},
    {"depth": 4, "par_ratio": 2},
    {"pre_norm": False},
    {"attn_aggregated_residuals": True, "attn_aggregated_residual_kwargs": {"lora_rank": 8}},
    {
        "gated_multi_residual": True,
        "num_residual_streams": 2,
        "residual_fn_kwargs": {"read_gate_rank": 8},
    },
    {"num_residual_streams": 2},
    {"num_residual_streams": 2, "qkv_receive_diff_residuals": True},
    {"num_residual_streams": 4, "rotary_pos_emb": True},
    {"shift_tokens": 1},
    {"shift_tokens": 2},
    {"layer_dropout": 0.3},
    {"reinject_input": True, "learned_reinject_input_gate": True},
    {"add_value_residual": True, "learned_value_residual_mix": False},
    {"integrate_layers": True, "layer_integrate_use_softmax": False},
    {"ff_glu": True, "ff_swish": True},
    {"ff_glu": True, "ff_glu_mult_bias": True},
    {"ff_glu": True, "ff_glu_softclamp": True},
    {"attn_dropout": 0.2, "ff_dropout": 0.2},
    {"attn_sublayer_dropout": 0.2, "ff_sublayer_dropout": 0.2},
)
"""Options of `Decoder` to certify, beside small sizes."""

FAMILIES = {"transformers": list_transformers, "x-transformers": list_x_transformers}


def certify(target: str, options: dict[str, Any], laws: list[str] | None) -> dict[str, Any]:
    """Return a module's certificate, or why it was refused."""
    settings = replace(SETTINGS, options=options, only=laws)
    try:
        return certify_in_child(target, settings, MEMORY, SECONDS)
    except RefusedError as error:
        return {"target": target, "refused": str(error), "laws": []}


def main() -> None:
    """Certify what the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--of", choices=list(FAMILIES), default="transformers")
    parser.add_argument("--only", action="append", metavar="LAW", help="may be repeated")
    asked = parser.parse_intermixed_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models are slower on more
    # A child process imports this module, too.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    lines = asked.file.read_text().splitlines() if asked.file.exists() else []
    done = {json.loads(line)["name"] for line in lines}
    for name, (target, options) in FAMILIES[asked.of]().items():
        if name in done or (asked.names and name not in asked.names):
            continue
        found = {"name": name, **certify(target, options, asked.only)}
        with asked.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{name}: {found.get('refused') or count_outcomes(found)}", flush=True)
        for law in found["laws"]:
            if law["verdict"] == "fails":
                print(f"  {law['law']} fails: {law['counterexample']}")


if __name__ == "__main__":
    main()
