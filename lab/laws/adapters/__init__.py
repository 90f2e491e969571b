"""Foreign modules, made to be called like the lab's own: from [b t d] to [b t e].

An adapter is an nn.Module that holds the foreign one as `module`, calls it as it wants to be, and
goes on from a state (`lab.layers.state`) where it can. `adapt` finds by probing which one a module
needs. What none suits is adapted by hand: any nn.Module whose forward maps [b t d] to [b t e], with
start, prefill and step if it decodes.

A decoder among them says more of itself: `relative`, whether only differences of positions count,
and `paddings`, which of "left", "right" and "scattered" padding it is to bear.
"""

from lab.laws.adapters.adaptation import accepted as accepted
from lab.laws.adapters.adaptation import adapt as adapt
from lab.laws.adapters.carried import Carried as Carried
from lab.laws.adapters.hugging_face import HuggingFace as HuggingFace
from lab.laws.adapters.hugging_face import HuggingFaceDecoder as HuggingFaceDecoder
from lab.laws.adapters.hugging_face import Layer as Layer
from lab.laws.adapters.plain import Plain as Plain
from lab.laws.adapters.plain import Positioned as Positioned
from lab.laws.adapters.reading import Adapted as Adapted
from lab.laws.adapters.stateful import Allocated as Allocated
from lab.laws.adapters.stateful import Returned as Returned
from lab.laws.adapters.stateful import Stateful as Stateful
from lab.laws.adapters.stateful import Stepping as Stepping
from lab.laws.adapters.tokens import DecodingTokens as DecodingTokens
from lab.laws.adapters.tokens import Tokens as Tokens
from lab.laws.adapters.tokens import token_ids as token_ids
from lab.laws.adapters.torch_own import Masked as Masked
from lab.laws.adapters.torch_own import Recurrent as Recurrent
