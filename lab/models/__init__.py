"""Models: stack notation, the blocks and the language model it makes, the named architectures."""

from lab.models.architectures import ARCHITECTURES, MIXERS, TRANSFORMS, build
from lab.models.block import Block
from lab.models.language_model import LanguageModel

__all__ = ["ARCHITECTURES", "MIXERS", "TRANSFORMS", "Block", "LanguageModel", "build"]
