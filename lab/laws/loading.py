"""Targets by name: any factory, or a small model of a public class."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeGuard

import torch
from torch import nn

from lab.files import describe_error
from lab.user_modules import import_object
from tasks.near_names import suggest

SIZES = {
    32: (
        "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size attention_hidden_size "
        "lru_width cross_attention_hidden_size hidden_dim attention_dim word_embed_proj_dim"
    ),
    64: (
        "intermediate_size ffn_dim n_inner d_ff moe_intermediate_size d_inner encoder_ffn_dim "
        "decoder_ffn_dim ffn_hidden_size expert_ffn_hidden_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size vocab_size intermediate_size_mlp expert_hidden_size "
        "shared_intermediate_size dff vocab_size_per_layer_input attn_hidden_size mlp_hidden_size "
        "mamba_d_ssm feed_forward_size"
    ),
    256: (
        "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length "
        "original_max_position_embeddings max_length"
    ),
    12: (
        "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size"
    ),
    16: (
        "q_lora_rank kv_lora_rank mamba_dt_rank time_step_rank o_lora_rank "
        "hidden_size_per_layer_input index_head_dim index_topk num_buckets"
    ),
    8: (
        "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim kv_channels mamba_d_state "
        "state_size ssm_state_size chunk_size mamba_chunk_size mamba_head_dim mamba_d_head "
        "linear_key_head_dim linear_value_head_dim global_head_dim swa_head_dim block_size "
        "rotary_dim attention_head_dim mamba_n_heads linear_head_dim adapter_rank shape_embed_dim "
        "pronunciation_embed_dim pronunciation_vocab_size shape_vocab_size"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
        "linear_num_key_heads linear_num_value_heads swa_num_attention_heads decoder_num_layers "
        "num_blocks linear_num_heads"
    ),
    2: (
        "num_key_value_heads num_kv_heads num_experts_per_tok moe_topk top_k "
        "moe_num_active_experts num_experts_per_token n_kv_heads swa_num_key_value_heads "
        "num_selected_experts moe_top_k moe_k num_global_key_value_heads num_groups_of_experts "
        "n_shared_experts"
    ),
    1: "n_group topk_group mamba_n_groups n_groups first_k_dense_replace num_expert_group",
}
"""Sizes of a small model, with the names of the fields that get them."""
FIELDS = {name: size for size, names in SIZES.items() for name in names.split()}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1, 3]},
    "CohereCompassTextConfig": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "DbrxConfig": {
        "attn_config": {"clip_qkv": 8.0, "rope_theta": 10_000.0, "kv_n_heads": 2},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    # Windows short enough to be compressed; layers that hash tokens have their table from a file.
    "DeepseekV4Config": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["moe"] * 4,
    },
    "Dots1Config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Dots3NoteTextConfig": {
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "head_dim": 16,
        **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "head_dim")},
        **{f"swa_{name}": 8 for name in ("qk_nope_head_dim", "v_head_dim")},
    },
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nTextConfig": {"intermediate_size": 64, "num_kv_shared_layers": 0},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba2Config": {"num_heads": 8},
    "MinistralConfig": {"head_dim": 8},
    "NemotronConfig": {"num_key_value_heads": 2},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
        "eos_token_id": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 32,
        "make_ngram_vocab_size_divisible_by": 4,
    },
    "ReformerConfig": {"axial_pos_embds": False},
    "XLMConfig": {"causal": True},
    "XmodConfig": {"default_language": "en_XX"},
    # Attention reads two vectors of the width side by side.
    "ZambaConfig": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "Zamba2Config": {"attention_hidden_size": 64, "attention_head_dim": 16},
}
"""Fields of configurations for which the sizes alone are not enough."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of configurations whose models choose experts. Their usual implementation refuses fp64,
and in fp32 so many choices are near a tie that little can be decided: the eager one is built."""
SPREAD = ("initializer_range", "init_std", "initializer_std")
STD = 0.2
"""Standard deviation of the weights: with the usual 0.02, so small a model hardly attends."""
MOST_PARAMETERS = 5_000_000


def is_config_class(found: Any) -> TypeGuard[type]:
    """Whether an object is the class of a configuration of transformers."""
    return isinstance(found, type) and any(
        base.__name__ in ("PreTrainedConfig", "PretrainedConfig") for base in found.__mro__[1:]
    )


class SmallModel:
    """Builds small causal language models with random weights, in evaluation mode.

    Args:
        config_class: the class of their configuration, e.g. `transformers.LlamaConfig`.
    """

    WRITTEN = "AutoModelForCausalLM.from_config({}).eval()"
    """How a program builds one, from its configuration."""
    IMPORT = "from transformers import AutoModelForCausalLM"

    def __init__(self, config_class: type):
        self.config_class = config_class
        self.__qualname__ = config_class.__name__

    def __call__(self, **options: Any) -> nn.Module:
        """Build one; options are fields of the configuration.

        Raises:
            ValueError: for a configuration that no causal language model has, or that stays large.
        """
        auto = import_module("transformers").AutoModelForCausalLM
        config = self.config_class(**self.complete(options))
        with torch.device("meta"):
            planned = auto.from_config(config)
        parameters = sum(p.numel() for p in planned.parameters())
        if parameters > MOST_PARAMETERS:
            name, largest = max(planned.named_parameters(), key=lambda pair: pair[1].numel())
            raise ValueError(
                f"a small model would have {parameters:,} parameters, of which {name} is "
                f"{list(largest.shape)}; set its sizes by option"
            )
        return auto.from_config(config).eval()

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a small configuration; options take precedence."""
        return {**find_small_fields(self.config_class), **options}


def find_small_fields(config_class: Any) -> dict[str, Any]:
    """Return the fields of a configuration that make its model small, by name."""
    usual = config_class()
    inner = {
        name: find_small_fields(type(part))
        for name, part in vars(usual).items()
        if is_config_class(type(part))
    }
    found = {**dict(_list_fields(usual)), **dict(_list_layer_kinds(usual)), **inner}
    if any(name in vars(usual) for name in EXPERTS):
        found["experts_implementation"] = "eager"
    found |= OTHERS.get(config_class.__name__, {})
    if vars(usual).get("is_decoder") is False and not usual.is_encoder_decoder:
        found["is_decoder"] = True  # BERT and its kin attend to later tokens without it
    if "kv_lora_rank" in found:  # latent attention has as many key heads as query heads
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def _list_fields(usual: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(usual).items():
        if name in ENDS and isinstance(value, int):
            yield name, ENDS[name]
        elif name in SPREAD and isinstance(value, float):
            yield name, STD
        elif name in FIELDS and type(value) is int and value > FIELDS[name]:
            yield name, FIELDS[name]


def _list_layer_kinds(usual: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields that name the kind of each layer, with few layers but every kind."""
    layers: Any = getattr(usual, "num_hidden_layers", None)
    for name, kinds in vars(usual).items():
        if isinstance(kinds, list) and len(kinds) == layers and isinstance(kinds[0], str):
            each = list(dict.fromkeys(kinds))
            few = min(layers, FIELDS["num_hidden_layers"])
            if 1 < len(each) <= few:
                yield name, [each[i % len(each)] for i in range(few)]


def load(path: str) -> Any:
    """Import the object named "package.module:name"; the name may have dots.

    The name of a configuration of transformers, alone or after "transformers:", stands for a small
    model of that kind with random weights.

    Raises:
        ValueError: when the path has another form, cannot be imported, or names nothing.
    """
    if path.isidentifier() and path.endswith("Config"):
        path = f"transformers:{path}"
    module, colon, name = path.partition(":")
    if not (module and colon and name) or module.startswith("."):
        raise ValueError(f"target={path}: must look like package.module:factory")
    try:
        found = import_object(module, name)
    # A user's module may raise anything when it is imported.
    except Exception as error:
        raise ValueError(f"target={path}: {describe_error(error)}") from error
    return SmallModel(found) if is_config_class(found) else found


def is_target(found: Any, options: Mapping[str, Any]) -> bool:
    """Whether the object loaded is itself the target: a module, or a function of one argument."""
    if isinstance(found, nn.Module):
        return True
    return inspect.isfunction(found) and not options and len(_list_required(found)) == 1


def build(factory: Callable[..., Any], options: Mapping[str, Any], seed: int) -> Any:
    """Call a factory after seeding torch, and return what it makes.

    Raises:
        ValueError: for arguments that are missing or unknown; when the factory raises, or makes
            something that cannot be called.
    """
    name = getattr(factory, "__qualname__", repr(factory))
    if not callable(factory):
        raise ValueError(f"the target is a {type(factory).__name__}, must be a class or a function")
    missing = [argument for argument in _list_required(factory) if argument not in options]
    if missing:
        given = " ".join(f"--option {argument}=…" for argument in missing)
        raise ValueError(f"{name} needs {', '.join(missing)}: give {given}")
    known = _list_known(factory)
    for argument in options:
        if known is not None and argument not in known:
            raise ValueError(f"{name} has no argument {argument}. {suggest(argument, known)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = factory(**options)
        except Exception as error:
            raise ValueError(f"{name} raised {describe_error(error)}") from error
    if not callable(made):
        raise ValueError(f"{name} returned {made!r:.100}, must return a module or a function")
    return made


def _list_known(function: Callable[..., Any]) -> list[str] | None:
    """Return the arguments that a function names; None if it takes others too."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of some built-in classes
        return None
    others = inspect.Parameter.VAR_KEYWORD
    return None if any(p.kind is others for p in parameters) else [p.name for p in parameters]


def _list_required(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of some built-in classes
        return []
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in positional]
