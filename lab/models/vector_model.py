"""A stack of blocks that reads vectors by a linear map, and whose head gives numbers."""

from torch import Tensor, nn

from lab.models.block import Block
from lab.models.language_model import LanguageModel


class VectorModel(LanguageModel):
    """Vectors [b t i] → numbers [b t o]: a linear map in place of the embedding table.

    All else is that of a language model: hooks, matrices, `prefill` and `step`, which take vectors
    in place of tokens. Build one with `lab.models.build`, by d_input and d_output.

    Args:
        blocks: the stack.
        d_input: i, numbers of a vector.
        d_output: o, numbers of an answer.
        embedding_std: at first, the standard deviation of an embedding's numbers, for vectors of
            variance 1, and of the map's bias, without which the norms of the blocks would hide a
            vector's length.
        train_embedding: whether the map gets gradient.
        logit_scale: fixed factor on what the head reads, and thus on the answers.
    """

    def __init__(
        self,
        blocks: list[Block],
        *,
        d_input: int,
        d_output: int,
        d_model: int,
        embedding_std: float = 1.0,
        train_embedding: bool = True,
        logit_scale: float = 1.0,
    ):
        super().__init__(
            blocks, vocab_size=d_output, d_model=d_model, tied=False, logit_scale=logit_scale
        )
        self.embed = nn.Linear(d_input, d_model)
        nn.init.normal_(self.embed.weight, std=embedding_std / d_input**0.5)
        nn.init.normal_(self.embed.bias, std=embedding_std)
        self.embed.requires_grad_(train_embedding)

    def generate(self, *_: object, **__: object) -> Tensor:
        """Refuse: its answers are numbers, and the next vector is not known from them.

        Raises:
            ValueError: always.
        """
        raise ValueError("a model that reads vectors answers with numbers, and generates no tokens")

    def check_inputs(self, inputs: object) -> None:
        """Check that inputs are a batch of vectors.

        Raises:
            ValueError: for what is not.
        """
        width = self.embed.in_features
        if not isinstance(inputs, Tensor):
            raise ValueError(
                f"vectors: must be a tensor [b t {width}], got a {type(inputs).__name__}"
            )
        if inputs.ndim != 3 or inputs.shape[2] != width or not inputs.is_floating_point():
            got = f"{str(inputs.dtype).removeprefix('torch.')} {list(inputs.shape)}"
            raise ValueError(f"vectors: must be floats [b t {width}], got {got}")
