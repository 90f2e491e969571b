"""Adapters: they give foreign modules the lab's interface, from [b t d] to [b t e].

An adapter is an nn.Module that holds the foreign module as `module`, calls it in its own way, and
goes on from a state (`lab.layers.state`) where it can. `adapt` finds by trying which adapter a
module needs. Where none fits, write one: any nn.Module whose forward maps [b t d] to [b t e], with
start, prefill and step if it decodes.

A decoder may have two more attributes: `relative`, whether only differences of positions count, and
`paddings`, the patterns of padding that it supports, of "left", "right" and "scattered".
"""

from lab.laws.adapters.adaptation import Adapted as Adapted
from lab.laws.adapters.adaptation import AdapterOptions as AdapterOptions
from lab.laws.adapters.adaptation import adapt as adapt
from lab.laws.adapters.adaptation import find_lengths_taken as find_lengths_taken
from lab.laws.adapters.libraries import HuggingFace as HuggingFace
from lab.laws.adapters.libraries import HuggingFaceDecoder as HuggingFaceDecoder
from lab.laws.adapters.libraries import HuggingFaceLayer as HuggingFaceLayer
from lab.laws.adapters.libraries import Masked as Masked
from lab.laws.adapters.libraries import TorchRecurrent as TorchRecurrent
from lab.laws.adapters.plain import Carried as Carried
from lab.laws.adapters.plain import PlainAdapter as PlainAdapter
from lab.laws.adapters.plain import Positioned as Positioned
from lab.laws.adapters.stateful import Allocated as Allocated
from lab.laws.adapters.stateful import Returned as Returned
from lab.laws.adapters.stateful import Stateful as Stateful
from lab.laws.adapters.stateful import Stepping as Stepping
from lab.laws.adapters.tokens import DecodingTokens as DecodingTokens
from lab.laws.adapters.tokens import Tokens as Tokens
from lab.laws.adapters.tokens import to_token_ids as to_token_ids
