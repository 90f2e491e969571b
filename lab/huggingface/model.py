"""A lab model with the interface of a Hugging Face causal language model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from lab.hooks import HookFn, HookPoint, NamesFilter
from lab.huggingface.configuration import LabConfig
from lab.huggingface.packing import PACKING, Documents, find_documents
from lab.layers.routed import RoutedMoE, imbalance, measure_share
from lab.layers.state import token_positions
from lab.models import LanguageModel, build
from lab.models.block import Block
from lab.models.language_model import ModelState

CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"
"""What the installed transformers calls the field that returns a cache."""


READY = "_is_hf_initialized"
"""What transformers sets to true on weights that a folder had."""
FOR_LOSS = frozenset(("num_items_in_batch", "shift_labels", "ignore_index", "weight"))
"""Arguments that go to transformers' loss."""
FOR_KERNELS = frozenset(("max_length_q", "max_length_k"))
"""Arguments that come beside lengths of documents and say nothing more."""


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
    supports_gradient_checkpointing = True

    def __init__(self, config: LabConfig):
        super().__init__(config)
        self.model = self._build()
        for parameter in self.parameters():
            setattr(parameter, READY, not parameter.is_meta)
        config.num_hidden_layers = len(self.model.list_blocks())
        self.gradient_checkpointing = False
        self.post_init()

    def _build(self) -> LanguageModel:
        config = self.config
        return build(
            config.stack,
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            n_heads=config.num_attention_heads,
            options=config.layer_options,
            tied=config.tie_word_embeddings,
            embedding_std=config.embedding_std,
            logit_scale=config.d_model**-0.5 if config.logit_scale is None else config.logit_scale,
            seed=torch.initial_seed() % 2**63,
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights of a module that a loaded folder lacks, as `build` draws them."""
        name = next((name for name, part in self.model.named_modules() if part is module), None)
        if name is None:
            # A larger table, whose first rows are then those of the smaller one.
            if isinstance(module, nn.Embedding):
                module.weight.normal_(std=self.config.embedding_std)
            return
        drawn = self._build().get_submodule(name)
        for key, parameter in module.named_parameters(recurse=False):
            if not getattr(parameter, READY, False):
                parameter.copy_(drawn.get_parameter(key))

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
        logits_to_keep: int | Int[Tensor, " q"] = 0,
        return_dict: bool | None = None,
        past_key_values: DecodingCache | None = None,
        position_ids: Int[Tensor, "b t"] | None = None,
        seq_idx: Int[Tensor, "b t"] | None = None,
        output_router_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits [b t v], and a loss where there are labels, as transformers' models do.

        Rows may be packed: where `position_ids`, `seq_idx` or `cu_seq_lens_q` say that a document
        begins, every mixer begins anew (`lab.huggingface.packing`), and no label is predicted
        from the document before.

        Args:
            input_ids: tokens; either these or `inputs_embeds`.
            attention_mask: 0 at padding, over the tokens before and the present ones.
            inputs_embeds: what the embedding table would give.
            cache: what an earlier call with `use_cache` returned.
            labels: the tokens again; shifted here, so that each position predicts the next one.
                Targets of the lab's tasks are shifted already: give them as `shift_labels`.
            use_cache: whether to return the state after these tokens.
            output_hidden_states: whether to return what each block reads, and what the head reads.
            logits_to_keep: compute logits of the last positions alone, or of some positions [q];
                0: of all.
            return_dict: whether to return an object; False: a tuple.
            past_key_values: `cache`, as transformers calls it before version 5.24.
            position_ids: how many tokens of its document stand before each; those of padding mean
                nothing.
            seq_idx: a number for each document of a row.
            output_router_logits: whether to return the routers' log-probabilities and the experts'
                balance loss, `aux_loss`, which is then part of the loss.
            kwargs: lengths of documents (`cu_seq_lens_q`, `cu_seqlens`), and what goes to the
                loss: `shift_labels`, `num_items_in_batch`.

        Raises:
            ValueError: for both or neither of `input_ids` and `inputs_embeds`, for an argument that
                the model does not know, another model's cache, positions that do not count the
                tokens read, packed rows with a cache, `output_router_logits` of a model without
                routed experts, or `output_attentions`: hook points give patterns
                (`self.model.run_with_cache`).
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if kwargs.pop("output_attentions", None) or self.config.output_attentions:
            raise ValueError(
                "output_attentions=True: not every mixer has one; use model.model.run_with_cache"
            )
        packing = {"position_ids": position_ids, "seq_idx": seq_idx}
        packing |= {name: kwargs.pop(name) for name in PACKING if name in kwargs}
        for name, value in kwargs.items():
            if name not in FOR_LOSS | FOR_KERNELS and value is not None:
                raise ValueError(f"{name}: is not an argument of this model")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        if return_dict is None:
            return_dict = self.config.return_dict
        x = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        keep = None if attention_mask is None else attention_mask[:, -x.shape[1] :].bool()
        keep = None if keep is None or bool(keep.all()) else keep
        before = past_key_values if cache is None else cache
        if not isinstance(before, DecodingCache | None):
            raise ValueError(
                f"{CACHE}: must be a cache that this model returned, got {type(before).__name__}; "
                "its mixers' states are not keys and values alone"
            )
        given = {name: value for name, value in packing.items() if value is not None}
        documents = _find_packed(given, x, before, keep, bool(use_cache))
        streams: list[Tensor] = []
        scores: list[Tensor] = []
        chosen: list[Tensor] = []
        collect: list[tuple[NamesFilter, HookFn]] = []
        if output_hidden_states:
            collect.append((_ends_with("hook_resid_pre"), partial(_collect, streams)))
        if output_router_logits:
            if not any(isinstance(part, RoutedMoE) for part in self.model.modules()):
                raise ValueError("output_router_logits=True: the model has no routed experts")
            collect.append((_ends_with("hook_router_scores"), partial(_collect, scores)))
            collect.append((_ends_with("hook_expert_indices"), partial(_collect, chosen)))
        with self.model.hooks(collect):
            if documents is None:
                hidden, after = self._read(x, before, keep, bool(use_cache))
            else:
                hidden, after = self._read(documents.unpack(x), None, None, False)
        if documents is not None:
            hidden = documents.pack(hidden)
            streams, scores, chosen = (
                [documents.pack(part) for part in parts] for parts in (streams, scores, chosen)
            )
            if labels is not None:
                labels = labels.masked_fill(documents.place == 0, kwargs.get("ignore_index", -100))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.head(hidden[:, kept])
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            for_loss = {name: value for name, value in kwargs.items() if name in FOR_LOSS}
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **for_loss
            )
        output: dict[str, Any] = {
            "loss": loss,
            "logits": logits,
            CACHE: after,
            "hidden_states": (*streams, hidden) if output_hidden_states else None,
        }
        if not output_router_logits:
            returned = CausalLMOutputWithPast(**output)
        else:
            balance = self._measure_balance(scores, chosen, keep)
            if loss is not None:
                output["loss"] = loss + balance
            logs: Any = tuple(score.flatten(0, 1).log() for score in scores)
            returned = MoeCausalLMOutputWithPast(**output, aux_loss=balance, router_logits=logs)
        return returned.to_tuple() if return_dict is False else returned

    def _measure_balance(
        self, scores: list[Tensor], chosen: list[Tensor], keep: Tensor | None
    ) -> Float[Tensor, ""]:
        """Return the sum of the layers' balance losses, over the tokens that are not padding."""
        routed = [part for part in self.model.modules() if isinstance(part, RoutedMoE)]
        total = scores[0].new_zeros(())
        for layer, p, indices in zip(routed, scores, chosen, strict=True):
            if keep is not None:
                p, indices = p[keep][None], indices[keep][None]
            total = total + layer.balance_weight * imbalance(p, measure_share(indices, p))
        return total

    def _read(
        self,
        x: Float[Tensor, "b t d"],
        cache: DecodingCache | None,
        keep: Tensor | None,
        use_cache: bool,
    ) -> tuple[Float[Tensor, "b t d"], DecodingCache | None]:
        """Return what the head reads, and the cache after these tokens if one is wanted."""
        if self.gradient_checkpointing and self.training and cache is None and not use_cache:
            for block in self.model.list_blocks():
                x = self._gradient_checkpointing_func(partial(_run_block, block, keep), x)
            return self.model.norm_final(x), None
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


def _find_packed(
    given: dict[str, Tensor],
    x: Float[Tensor, "b t d"],
    cache: DecodingCache | None,
    keep: Tensor | None,
    use_cache: bool,
) -> Documents | None:
    """Return the documents of packed rows; None where each row is one document.

    Raises:
        ValueError: for positions that do not count the tokens read, or packed rows with a cache.
    """
    if given.keys() == {"position_ids"}:
        counted = token_positions(
            x.shape[1], x.device, None if cache is None else cache.state, keep
        ).expand(x.shape[:2])
        kept = slice(None) if keep is None else keep
        if torch.equal(given["position_ids"].expand(x.shape[:2])[kept], counted[kept]):
            return None
    if not given:
        return None
    if cache is not None:
        raise ValueError(
            f"{' and '.join(given)}: beside a cache, positions go on from the tokens read; "
            "packed rows take no cache"
        )
    documents = find_documents(given, (x.shape[0], x.shape[1]), keep)
    if use_cache:
        raise ValueError(f"use_cache=True: {' and '.join(given)} pack rows, which leave no state")
    return documents


def _run_block(block: Block, keep: Tensor | None, x: Tensor) -> Tensor:
    return block(x) if keep is None else block.prefill(x, None, keep)[0]


def _ends_with(point: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(point)


def _collect(streams: list[Tensor], x: Tensor, hook: HookPoint) -> None:
    streams.append(x)
