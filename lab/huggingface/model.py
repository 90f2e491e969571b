"""A lab model with the interface of a Hugging Face causal language model."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lab.hooks import HookFn, HookPoint, NamesFilter
from lab.huggingface.configuration import LabConfig
from lab.models import LanguageModel, build
from lab.models.language_model import ModelState

CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"
"""What the installed transformers calls the field that returns a cache."""


FOR_LOSS = frozenset(("num_items_in_batch", "shift_labels", "ignore_index", "weight"))
"""Arguments that go to transformers' loss."""
LEFT_OUT = "Positions count the tokens of a row that attention_mask keeps; rows are not packed"


class DecodingCache(Cache):
    """What `generate` carries from token to token: the states of all mixers.

    Attributes:
        state: after the tokens read so far.
        length: how many those are, padding included.
    """

    def __init__(self, state: ModelState, length: int):
        super().__init__(layers=[])
        self.state, self.length = state, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens have been read."""
        return self.length

    def reorder_cache(self, beam_idx: Int[Tensor, " b"]) -> None:
        """Give each row the state of the row that its beam continues."""
        self.state = tree_map_only(Tensor, lambda x: x.index_select(0, beam_idx), self.state)


class LabForCausalLM(PreTrainedModel, GenerationMixin):
    """The lab's language model behind `from_pretrained`, `save_pretrained` and `generate`.

    `model` is the lab's own `LanguageModel`, with its hook points and analyses. Logits are those
    that it computes. Rows padded on the left are read without their padding.
    """

    config: LabConfig
    config_class = LabConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _tied_weights_keys = {"model.head.weight": "model.embed.weight"}  # noqa: RUF012
    _is_stateful = True

    def __init__(self, config: LabConfig):
        super().__init__(config)
        self.model: LanguageModel = build(
            config.stack,
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            n_heads=config.n_heads,
            options=config.layer_options,
            tied=config.tie_word_embeddings,
            embedding_std=config.embedding_std,
            logit_scale=config.d_model**-0.5 if config.logit_scale is None else config.logit_scale,
            seed=torch.initial_seed() % 2**63,
        )
        config.num_hidden_layers = len(self.model.list_blocks())
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leave the weights as `build` has initialised them."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding table."""
        return self.model.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding table, and the head with it where it is the same."""
        assert isinstance(value, nn.Embedding)
        self.model.embed = value

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        assert isinstance(new_embeddings, nn.Linear)
        self.model.head = new_embeddings

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.model.head

    def forward(
        self,
        input_ids: Int[Tensor, "b t"] | None = None,
        attention_mask: Int[Tensor, "b s"] | None = None,
        inputs_embeds: Float[Tensor, "b t d"] | None = None,
        cache: DecodingCache | None = None,
        labels: Int[Tensor, "b t"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        past_key_values: DecodingCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits [b t v], and a loss where there are labels, as transformers' models do.

        Args:
            input_ids: tokens; either these or `inputs_embeds`.
            attention_mask: 0 at padding, over the tokens before and the present ones.
            inputs_embeds: what the embedding table would give.
            cache: what an earlier call with `use_cache` returned.
            labels: the tokens again; shifted here, so that each position predicts the next one.
            use_cache: whether to return the state after these tokens.
            output_hidden_states: whether to return what each block reads, and what the head reads.
            logits_to_keep: compute logits of the last positions alone; 0: of all.
            return_dict: whether to return an object; False: a tuple.
            past_key_values: `cache`, as transformers calls it before version 5.24.
            kwargs: what `Trainer` gives to the loss: `num_items_in_batch`.

        Raises:
            ValueError: for both or neither of `input_ids` and `inputs_embeds`, for an argument that
                the model does not know, such as `position_ids`, or for `output_attentions`: hook
                points give patterns (`self.model.run_with_cache`).
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if kwargs.pop("output_attentions", None) or self.config.output_attentions:
            raise ValueError(
                "output_attentions=True: not every mixer has one; use model.model.run_with_cache"
            )
        for name, value in kwargs.items():
            if name not in FOR_LOSS and value is not None:
                raise ValueError(f"{name}: is not an argument of this model. {LEFT_OUT}")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if return_dict is None:
            return_dict = self.config.return_dict
        x = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        keep = None if attention_mask is None else attention_mask[:, -x.shape[1] :].bool()
        keep = None if keep is None or bool(keep.all()) else keep
        streams: list[Tensor] = []
        collect: list[tuple[NamesFilter, HookFn]] = [(_is_block_input, partial(_collect, streams))]
        before = past_key_values if cache is None else cache
        with self.model.hooks(collect if output_hidden_states else []):
            hidden, after = self._read(x, before, keep, bool(use_cache))
        logits = self.model.head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        carried: dict[str, Any] = {CACHE: after}
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=(*streams, hidden) if output_hidden_states else None,
            **carried,
        )
        return output.to_tuple() if return_dict is False else output

    def _read(
        self,
        x: Float[Tensor, "b t d"],
        cache: DecodingCache | None,
        keep: Tensor | None,
        use_cache: bool,
    ) -> tuple[Float[Tensor, "b t d"], DecodingCache | None]:
        """Return what the head reads, and the cache after these tokens if one is wanted."""
        if cache is None and keep is None and not use_cache:
            return self.model.forward_embeddings(x), None
        if cache is not None and x.shape[1] == 1 and keep is None:
            hidden, state = self.model.step_embeddings(x[:, 0], cache.state)
            hidden = hidden[:, None]
        else:
            before = None if cache is None else cache.state
            hidden, state = self.model.prefill_embeddings(x, before, keep)
        if not use_cache:
            return hidden, None
        return hidden, DecodingCache(state, x.shape[1] + (0 if cache is None else cache.length))


def _is_block_input(name: str) -> bool:
    return name.endswith("hook_resid_pre")


def _collect(streams: list[Tensor], x: Tensor, hook: HookPoint) -> None:
    streams.append(x)
