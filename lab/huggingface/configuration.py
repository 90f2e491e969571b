"""The configuration of a lab model, as Hugging Face saves it."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from lab.config import ModelConfig


class LabConfig(PreTrainedConfig):
    """A stack of mixers and state transforms, or one of the paper's architectures by name.

    Attributes:
        vocab_size: rows of the embedding table.
        stack: pairs of letters, or a name: see `lab.models.build`.
        d_model: width of the residual stream; `hidden_size` is the same.
        num_attention_heads: heads of every mixer; `n_heads` is the same.
        layer_options: constructor arguments by letter, or by block and letter.
        embedding_std: standard deviation of the initial embedding table.
        logit_scale: fixed factor on the logits; None: 1/√d_model, so that an untrained model
            guesses evenly.
        tie_word_embeddings: whether the head is the embedding table.
        num_hidden_layers: how many blocks the stack has; a model fills it in.
        output_router_logits: whether a model with routed experts adds their balance loss.

    Raises:
        ValueError: for a model with a mixer of your own (`ModelConfig.model`): a folder from
            elsewhere would then choose which code to import.
    """

    model_type = "wonderful-lab"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "n_heads": "num_attention_heads",
    }

    vocab_size: int = 8192
    stack: str = "cheems"
    d_model: int = 64
    num_attention_heads: int = 1
    layer_options: dict[str, Any] | None = None
    embedding_std: float = 0.02
    logit_scale: float | None = None
    tie_word_embeddings: bool = True
    num_hidden_layers: int | None = None
    use_cache: bool = True
    output_router_logits: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @classmethod
    def from_model_config(cls, config: ModelConfig, vocab_size: int) -> "LabConfig":
        """Return the configuration of a model that the lab trains.

        Raises:
            ValueError: for a model with a mixer of your own.
        """
        if config.model is not None:
            raise ValueError(
                f"model={config.model}: a model with a mixer of your own cannot be saved for "
                "transformers, because loading it would import that code"
            )
        assert config.n_heads is not None  # only a mixer of your own has its own default
        return cls(
            vocab_size=vocab_size,
            stack=config.stack,
            d_model=config.d_model,
            num_attention_heads=config.n_heads,
            layer_options=dict(config.options),
            embedding_std=config.embedding_std,
            logit_scale=config.logit_scale,
            tie_word_embeddings=config.tied,
        )
