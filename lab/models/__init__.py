"""Models: stack notation, the blocks and the language model it makes, the named architectures."""

from lab.models.architectures import ARCHITECTURES, CLASSES, TRANSFORMS, build
from lab.models.block import Block
from lab.models.language_model import LanguageModel
from lab.models.mixers import MIXERS

__all__ = ["ARCHITECTURES", "CLASSES", "MIXERS", "TRANSFORMS", "Block", "LanguageModel", "build"]
