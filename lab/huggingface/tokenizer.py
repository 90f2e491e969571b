"""A tokenizer for models of the task `bytes`: the token of a byte is its value."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that turns text into its UTF-8 bytes and back; byte 0 pads on the left.

    >>> tokenizer = build_byte_tokenizer()
    >>> tokenizer("é!")["input_ids"]
    [195, 169, 33]
    >>> tokenizer.decode([195, 169, 33])
    'é!'
    """
    characters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE({c: byte for byte, c in characters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=characters[0],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
