"""What a model answers without some of its experts.

An expert adds w_e up_e to the residual stream wherever it is chosen. A deletion subtracts that
behind the block, and only later blocks run again, on the rows that it changes. This works for
CDMoE and PEER; φ, which all tokens share, stays.

    n choices that are deleted    q scored positions of the batch
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from analysis.base import NotApplicableError
from analysis.scoring import Scored, scored
from lab.hooks import HookPoint
from lab.layers.retrieval import RetrievedExperts
from lab.models import LanguageModel
from lab.models.evaluation import tell_oracle_masks
from lab.ops.experts import expert_scores, expert_sum
from tasks.base import Batch


@dataclass(frozen=True)
class ScoredAnswers:
    """Loss and answer at each scored position of a batch.

    Attributes:
        losses: cross-entropy, nats.
        right: whether the answer is the target.
    """

    losses: Float[Tensor, " q"]
    right: Bool[Tensor, " q"]


@dataclass(frozen=True)
class Site:
    """A layer with product-key experts, and its activations on a batch.

    Attributes:
        model: the model.
        batch: its rows.
        layer: index of the block.
        module: the layer.
        indices: of the experts chosen.
        weights: the factor of each one's `up`.
        before: the residual stream that the layer's norm reads.
        after: the residual stream behind the block.
        clean: what the model answers with all experts.
    """

    model: LanguageModel
    batch: Batch
    layer: int
    module: RetrievedExperts
    indices: Int[Tensor, "b t h k"]
    weights: Float[Tensor, "b t h k"]
    before: Float[Tensor, "b t d"]
    after: Float[Tensor, "b t d"]
    clean: Scored

    @property
    def n_experts(self) -> int:
        """Rows of the layer's tables."""
        return len(self.module.down)

    @cached_property
    def whole(self) -> ScoredAnswers:
        """Loss and answers with all experts."""
        with torch.no_grad():
            return ScoredAnswers(self.clean.losses, self.clean.right)

    @cached_property
    def counts(self) -> Int[np.ndarray, " experts"]:
        """How often each expert is chosen."""
        return torch.bincount(self.indices.flatten(), minlength=self.n_experts).cpu().numpy()

    @cached_property
    def loads(self) -> Float[np.ndarray, " experts"]:
        """Each expert's Σ |w_e| over the choices."""
        size = self.weights.abs().double().flatten()
        return torch.bincount(self.indices.flatten(), size, self.n_experts).cpu().numpy()

    @torch.no_grad()
    def delete(self, deleted: Bool[Tensor, "b t h k"]) -> ScoredAnswers:
        """Return loss and answers when these choices have weight 0.

        Rows in which nothing is deleted keep theirs, to the bit.
        """
        touched = deleted.flatten(1).any(1)
        rows = touched.nonzero()[:, 0]
        if not len(rows):
            return self.whole
        gone = expert_sum(
            self.weights[rows] * deleted[rows], self.module.up, self.indices[rows], "gather"
        )
        again = touched[self.clean.rows]
        # The index of each position's row among the rows that run again.
        place = (touched.cumsum(0) - 1)[self.clean.rows[again]]
        hidden = self._run_later_blocks(self.after[rows] - gone, rows)
        found = Scored(
            rows=place,
            positions=self.clean.positions[again],
            targets=self.clean.targets[again],
            hidden=hidden[place, self.clean.positions[again]],
            head=self.clean.head,
        )
        losses, right = self.whole.losses.clone(), self.whole.right.clone()
        losses[again], right[again] = found.losses, found.right
        return ScoredAnswers(losses, right)

    @torch.no_grad()
    def measure_unused(self) -> float:
        """Return the largest change of the layer's output when unused experts are zero.

        It is exactly 0, unless something reads them.
        """
        norm = self.model.blocks[self.layer].norm_mlp
        assert isinstance(norm, nn.Module)
        z = norm(self.before)
        used = torch.from_numpy(self.counts > 0).to(z.device)[:, None]
        tables = {"down": self.module.down * used, "up": self.module.up * used}
        changed = functional_call(self.module, tables, (z,)) - self.module(z)
        return changed.abs().max().item()

    def select(
        self, expert: int, role: int | None = None, rows: Int[Tensor, " r"] | None = None
    ) -> Bool[Tensor, "b t h k"]:
        """Return where an expert is chosen, by all tokens or those of one role or some rows."""
        chosen = self.indices == expert
        if role is not None:
            chosen = chosen & (self.batch.roles == role)[..., None, None]
        if rows is not None:
            kept = torch.zeros(len(chosen), dtype=torch.bool, device=chosen.device)
            kept[rows] = True
            chosen = chosen & kept[:, None, None, None]
        return chosen

    def attribute(self) -> Float[Tensor, "b t h k"]:
        """Return how much the loss of a row would rise without each choice, to first order.

            −w_e up_e · ∂L/∂y,  L the sum of a row's losses, y the residual stream behind the block

        In nats; exact if L is linear between y and y − w_e up_e.
        """
        with torch.enable_grad():
            after = self.after.detach().requires_grad_()
            hidden = self._run_later_blocks(after, torch.arange(len(after), device=after.device))
            hidden = hidden[self.clean.rows, self.clean.positions]
            total = Scored(
                self.clean.rows, self.clean.positions, self.clean.targets, hidden, self.clean.head
            ).losses.sum()
            gradient = torch.autograd.grad(total, after)[0]
        with torch.no_grad():
            along = expert_scores(gradient, self.module.up, self.indices, "gather")
        return -self.weights * along

    def _run_later_blocks(
        self, x: Float[Tensor, "r t d"], rows: Int[Tensor, " r"]
    ) -> Float[Tensor, "r t d"]:
        """Run the later blocks on some rows, and return the last hidden states."""
        with tell_oracle_masks(self.model, self.batch, rows):
            for block in self.model.blocks[self.layer + 1 :]:
                x = block(x)
        return self.model.norm_final(x)


def find_retrieval_layers(model: LanguageModel) -> dict[int, RetrievedExperts]:
    """Find the layers with product-key experts, by index of the block.

    Raises:
        NotApplicableError: when there are none.
    """
    modules = {
        layer: block.mlp
        for layer, block in enumerate(model.blocks)
        if isinstance(block.mlp, RetrievedExperts)
    }
    if not modules:
        raise NotApplicableError("no block retrieves experts by product keys")
    return modules


@torch.no_grad()
def build_sites(
    model: LanguageModel, batch: Batch, layers: Collection[int] | None = None
) -> list[Site]:
    """Run a model on a batch, and return its layers with product-key experts in order.

    Args:
        model: a language model.
        batch: rows of any task.
        layers: which blocks; None for all that have such experts.

    Raises:
        NotApplicableError: for a model without such a layer.
        ValueError: for a block without such experts.
    """
    modules = find_retrieval_layers(model)
    for layer in layers or ():
        if layer not in modules:
            known = ", ".join(map(str, modules))
            raise ValueError(f"{layer=}: has no product-key experts; known: {known}")
    if layers is not None:
        modules = {layer: modules[layer] for layer in sorted(set(layers))}
    cache: dict[str, Tensor] = {}

    def keep(tensor: Tensor, point: HookPoint) -> None:
        cache[point.name] = tensor

    names = (
        "mlp.hook_expert_indices",
        "mlp.hook_expert_weights",
        "hook_resid_mid",
        "hook_resid_post",
    )
    wanted = [f"blocks.{layer}.{name}" for layer in modules for name in names]
    with model.hooks([(wanted, keep)]):
        clean = scored(model, batch)
    return [
        Site(
            model,
            batch,
            layer,
            module,
            *(cache[f"blocks.{layer}.{name}"] for name in names),
            clean=clean,
        )
        for layer, module in modules.items()
    ]
