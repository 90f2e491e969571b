"""The layers, readings, backends and architectures that every law is tried on, a line each."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lab.laws import Outcome, Reach
from lab.layers.attention import Attention
from lab.layers.cdmoe import CDMoE
from lab.layers.family.based import Based
from lab.layers.family.comba import Comba
from lab.layers.family.deltanet import DeltaNet
from lab.layers.family.deltaproduct import GatedDeltaProduct
from lab.layers.family.differential import DifferentialAttention
from lab.layers.family.distance import ALiBi, ForgettingAttention
from lab.layers.family.gated_deltanet import GatedDeltaNet
from lab.layers.family.gla import GatedLinearAttention
from lab.layers.family.hgrn2 import HGRN2
from lab.layers.family.hyena import Hyena
from lab.layers.family.kda import KimiDeltaAttention
from lab.layers.family.linear_attention import LinearAttention
from lab.layers.family.log_linear import LogLinearAttention
from lab.layers.family.mamba import Mamba1
from lab.layers.family.mamba3 import Mamba3
from lab.layers.family.mingru import MinGRU
from lab.layers.family.mlstm import MLSTM
from lab.layers.family.retnet import Retention
from lab.layers.family.rglru import RGLRU
from lab.layers.family.rwkv6 import RWKV6
from lab.layers.family.rwkv7 import RWKV7
from lab.layers.family.sliding_window import SlidingWindowAttention
from lab.layers.family.stickbreaking import StickBreakingAttention
from lab.layers.family.ttt import TTTLinear
from lab.layers.inner_function import InnerFunctionAttention
from lab.layers.mlp import MLP
from lab.layers.peer import PEER
from lab.layers.printed import (
    DynamicBaseAttention,
    FloorSquareCDMoE,
    MaskAfterSoftmaxAttention,
    RoundedRotationAttention,
    TargetSummedSSD,
)
from lab.layers.routed import RoutedMoE, SharedExpertMoE
from lab.layers.ssd import SSD
from lab.studies.variants import (
    AlignedAttention,
    ConvolvedAttention,
    NearIdentityAttention,
    NormedAttention,
    PartialRotary,
    ShiftedKeys,
)
from tests.case import Case, OracleMasked, build_architecture, move

NO_CHOICE: dict[str, Reach] = {"value_query.weight": "none", "value_keys": "none"}
ZERO_KEYS: dict[str, Reach] = {"value_query.weight": "zero"}
NO_MASK: dict[str, Reach] = {"mask.l": "none"}
ZERO_A: dict[str, Reach] = {"mask.dt.weight": "zero"}
TIED_QUERY: dict[str, Reach] = {"query.weight": "zero"}
ZERO_EXPERTS: dict[str, Reach] = {"down": "zero", "up": "zero"}

TABLE: dict[str, Outcome] = {"relative": "not applicable"}
"""A mask that learns a number for each position."""
JUMPS: dict[str, Outcome] = dict.fromkeys(
    ("gradient is the derivative", "twice differentiable"), "not decided"
)
"""A choice among equals jumps where it is tried; a surrogate gradient is no derivative."""
CHANCE: dict[str, Outcome] = {"precision": "not decided"}
"""Rounding alone chooses among equals."""
TIES: dict[str, Outcome] = {"table reach": "fails", **JUMPS}
"""Keys that score alike choose the same rows for every token (errata I1, C3)."""
WAITS: dict[str, Outcome] = {"gradient reach": "holds"}
"""What learns nothing waits for a zero in front of it to move."""
GROWS: dict[str, Outcome] = {"stable": "fails"}
"""Nothing bounds a state without decay: it grows with the number of tokens."""
FADES: dict[str, Outcome] = {"stable": "fails"}
"""The state holds a bias of each key that falls with its distance: outputs do not grow."""
HEAVY: dict[str, Outcome] = {"stable": "not decided"}
"""With A > 0 a value mask has unbounded biases: the more tokens, the larger the largest."""

UNMIXED: dict[str, Outcome] = {"matrix applies": "not applicable"}
"""What tokens write depends on what others wrote: there is no matrix."""

A, IFA = Attention, InnerFunctionAttention

MIXERS = [
    Case("attention", lambda: A(8)),
    Case("attention 2 heads", lambda: A(8, 2)),
    Case("attention grouped heads", lambda: A(8, 4, n_kv_heads=2)),
    Case("attention one key head", lambda: A(8, 4, n_kv_heads=1)),
    Case(
        "attention grouped value window",
        lambda: move(A(16, 4, n_kv_heads=2, mask="value", window=3)),
        d_model=16,
    ),
    Case("attention interleaved", lambda: A(8, 2, rope_layout="interleaved", rope_base=100.0)),
    Case("attention no position", lambda: A(9, 3, position="none"), d_model=9),
    Case("attention wide values", lambda: A(8, 2, d_value=20)),
    Case("attention literal mask", lambda: A(8, 2, mask="literal"), NO_MASK, TABLE),
    Case("attention literal mask moved", lambda: move(A(8, 2, mask="literal")), NO_MASK, TABLE),
    Case(
        "attention straight-through mask",
        lambda: A(8, 2, mask="straight-through"),
        verdicts=TABLE | JUMPS,
    ),
    Case(
        "attention straight-through moved",
        lambda: move(A(8, 2, mask="straight-through")),
        verdicts=TABLE | JUMPS,
    ),
    Case("attention soft mask", lambda: A(8, mask="soft", max_seq_len=64), verdicts=TABLE),
    Case(
        "attention soft mask moved",
        lambda: move(A(8, 2, mask="soft", position="none")),
        verdicts=TABLE,
    ),
    Case("attention soft mask window", lambda: move(A(8, 2, mask="soft", window=3)), {}, TABLE),
    Case("attention value mask", lambda: A(8, 2, mask="value"), ZERO_A, WAITS),
    Case("attention value mask moved", lambda: move(A(8, 2, mask="value")), verdicts=HEAVY),
    Case("attention value grouped heads", lambda: move(A(8, 4, mask="value", n_kv_heads=2))),
    Case(
        "attention value mask window",
        lambda: A(8, 2, mask="value", window=2),
        ZERO_A,
        WAITS | JUMPS | CHANCE,
    ),
    Case("attention value window moved", lambda: move(A(8, 2, mask="value", window=2)), {}, HEAVY),
    Case("attention oracle mask", lambda: OracleMasked(A(8, 2, mask="oracle")), verdicts=TABLE),
    Case("linear attention", lambda: LinearAttention(8, 2), verdicts=GROWS),
    Case("linear attention sums", lambda: LinearAttention(8, normalise=False), verdicts=GROWS),
    Case("based", lambda: Based(8, 2, d_state=3), verdicts=GROWS),
    Case("based rope", lambda: Based(8, d_state=2, position="rope", conv_width=2), verdicts=GROWS),
    Case("retnet", lambda: Retention(8, 2)),
    Case("gla", lambda: GatedLinearAttention(8, 2, gate_rank=3)),
    Case(
        "gla rope",
        lambda: GatedLinearAttention(8, gate_rank=3, position="rope", conv_width=2),
        verdicts={"relative": "not applicable"},
    ),
    Case("hgrn2", lambda: HGRN2(8, 2)),
    Case("hgrn2 bounded", lambda: HGRN2(8, 2, d_state=3, lower_bound=0.5)),
    Case("mlstm", lambda: MLSTM(8, 2)),
    Case("mlstm rope", lambda: MLSTM(8, position="rope", conv_width=3, norm=False)),
    Case("rwkv6", lambda: RWKV6(8, 2, mix_rank=2, decay_rank=3)),
    Case("rwkv6 convolved", lambda: move(RWKV6(8, mix_rank=1, conv_width=2, gate="none"))),
    Case("log-linear", lambda: LogLinearAttention(8, 2, n_levels=5)),
    Case("log-linear short", lambda: move(LogLinearAttention(8, n_levels=3, position="rope"))),
    Case("mamba", lambda: Mamba1(8, d_state=4)),
    Case("mamba plain", lambda: move(Mamba1(6, d_state=3, d_inner=8, conv_width=0)), d_model=6),
    Case("mingru", lambda: MinGRU(8)),
    Case("mingru wide", lambda: move(MinGRU(8, d_inner=12, conv_width=2, gate="silu"))),
    Case("rglru", lambda: RGLRU(8, 2)),
    Case("rglru plain", lambda: move(RGLRU(8, d_inner=6, conv_width=0, gate="none"))),
    Case("hyena", lambda: Hyena(8, filter_len=16, filter_width=6)),
    Case("hyena bands", lambda: move(Hyena(8, filter_len=16, filter_width=4, n_bands=3))),
    Case("mamba3", lambda: Mamba3(8, 2, chunk_len=4)),
    Case("mamba3 of three", lambda: move(Mamba3(8, 2, d_state=4, mimo_rank=3, chunk_len=4))),
    Case("mamba3 unrotated", lambda: move(Mamba3(8, d_state=3, rotated=0.0, norm=True))),
    Case("deltanet", lambda: DeltaNet(8, 2)),
    Case("deltanet negative", lambda: move(DeltaNet(8, d_state=4, negative=True, conv_width=0))),
    Case("gated deltanet", lambda: GatedDeltaNet(8, 2)),
    Case(
        "gated deltanet negative rope",
        lambda: GatedDeltaNet(8, negative=True, position="rope", conv_width=0, gate="none"),
    ),
    Case("kda", lambda: KimiDeltaAttention(8, 2)),
    Case(
        "kda negative rope",
        lambda: KimiDeltaAttention(8, negative=True, rank=3, position="rope", gate="none"),
        verdicts={"relative": "not applicable"},
    ),
    Case("deltaproduct", lambda: GatedDeltaProduct(8, 2)),
    Case(
        "deltaproduct of three",
        lambda: move(GatedDeltaProduct(8, d_state=4, n_writes=3, negative=False, conv_width=0)),
    ),
    Case("comba", lambda: Comba(8, 2)),
    Case("comba rope", lambda: move(Comba(8, correction=0.02, position="rope", conv_width=0))),
    Case("rwkv7", lambda: RWKV7(8, 2, rank=2, gate_rank=3)),
    Case("rwkv7 plain", lambda: move(RWKV7(8, rank=1, conv_width=2, gate="none", norm=False))),
    Case("ttt", lambda: TTTLinear(8, 2, batch_len=4), verdicts=UNMIXED),
    Case("ttt moved", lambda: move(TTTLinear(8, batch_len=3)), verdicts=UNMIXED),
    Case("alibi", lambda: ALiBi(9, 3), verdicts=FADES, d_model=9),
    Case("forgetting attention", lambda: ForgettingAttention(8, 2), verdicts=FADES),
    Case(
        "forgetting attention rope",
        lambda: move(ForgettingAttention(8, position="rope")),
        verdicts=FADES,
    ),
    Case("sliding window", lambda: SlidingWindowAttention(8, 2, window=3)),
    Case("sliding window of two", lambda: SlidingWindowAttention(8, window=2, position="none")),
    Case("stick-breaking", lambda: StickBreakingAttention(8, 2)),
    Case("stick-breaking current", lambda: move(StickBreakingAttention(8, current=True))),
    Case("differential attention", lambda: DifferentialAttention(8, 2)),
    Case("differential moved", lambda: move(DifferentialAttention(6, position="none")), d_model=6),
    Case("ifa softmax", lambda: IFA(8)),
    Case("ifa softmax 2 of 5", lambda: IFA(8, 2, n_values=5, k=2)),
    Case("ifa softmax all of 3", lambda: IFA(8, n_values=3, k=3, d_retrieval=2)),
    Case("ifa softmax zero keys", lambda: IFA(8, key_init="zeros"), ZERO_KEYS, TIES | WAITS),
    Case("ifa literal", lambda: IFA(8, 2, retrieval="literal"), NO_CHOICE),
    Case("ifa as printed", lambda: IFA(8, retrieval="literal", key_init="zeros"), NO_CHOICE, TIES),
    Case("ifa sigmoid", lambda: IFA(8, 2, n_values=4, k=2, retrieval="sigmoid")),
    Case(
        "ifa sigmoid zero keys",
        lambda: IFA(8, retrieval="sigmoid", key_init="zeros"),
        ZERO_KEYS,
        TIES | WAITS,
    ),
    Case(
        "ifa straight-through",
        lambda: IFA(8, n_values=4, retrieval="straight-through"),
        verdicts=JUMPS,
    ),
    Case(
        "ifa straight-through zero keys",
        lambda: IFA(8, retrieval="straight-through", key_init="zeros"),
        ZERO_KEYS,
        TIES | WAITS,
    ),
    Case("ifa linear", lambda: IFA(8, 2, value_map="linear")),
    Case("ifa linear grouped heads", lambda: IFA(8, 4, value_map="linear", n_kv_heads=2)),
    Case("ifa linear narrow", lambda: IFA(8, 2, value_map="linear", d_value=4)),
    Case("ifa linear literal", lambda: IFA(8, value_map="linear", retrieval="literal"), NO_CHOICE),
    Case("ifa no position", lambda: IFA(8, 2, position="none")),
    Case("ifa value mask", lambda: move(IFA(8, 2, mask="value", window=3))),
    Case(
        "ifa soft mask",
        lambda: move(IFA(8, 2, mask="soft", retrieval="sigmoid")),
        verdicts=TABLE,
    ),
    Case(
        "the paper's attention",
        lambda: IFA(8, mask="literal", retrieval="literal", key_init="zeros"),
        NO_CHOICE | NO_MASK,
        TABLE | TIES,
    ),
    Case("ssd", lambda: SSD(8, d_state=4, chunk_len=4)),
    Case("ssd one chunk", lambda: SSD(8, 2, d_state=6)),
    Case("ssd chunks of one", lambda: SSD(8, 2, d_state=4, chunk_len=1)),
    Case("ssd groups", lambda: SSD(8, 4, d_state=4, n_groups=2, chunk_len=4)),
    Case(
        "ssd tiled groups",
        lambda: SSD(8, 4, d_state=4, n_groups=2, groups="tiled", chunk_len=3),
    ),
    Case("ssd interleaved", lambda: SSD(8, d_state=4, rope_layout="interleaved", chunk_len=4)),
    Case("ssd decay", lambda: SSD(8, 2, d_state=3, position="decay", chunk_len=4)),
    Case(
        "ssd no position",
        lambda: SSD(8, 2, d_state=3, position="none", chunk_len=4),
        verdicts=GROWS,
    ),
    Case("ssd convolution", lambda: SSD(8, 2, d_state=3, position="conv", chunk_len=4)),
    Case(
        "ssd convolution of groups",
        lambda: SSD(8, 4, d_state=4, n_groups=2, position="conv", chunk_len=3),
    ),
    Case("ssd wide", lambda: SSD(8, 2, d_state=4, d_inner=16, chunk_len=4)),
    Case("ssd convolution of one", lambda: SSD(8, d_state=2, position="conv", conv_width=1)),
    Case("ssd gate", lambda: SSD(8, 2, d_state=4, gate="silu", chunk_len=4)),
    Case("ssd gated norm", lambda: SSD(8, 4, d_state=4, n_groups=2, gate="norm", chunk_len=4)),
    Case(
        "ssd as mamba-2",
        lambda: SSD(8, 2, d_state=4, position="conv", gate="norm", d_inner=16, chunk_len=4),
    ),
    Case("ssd as printed", lambda: SSD(8, 2, d_state=4, dt_init="paper", chunk_len=4)),
    Case("ssd no skip", lambda: SSD(8, 2, d_state=4, skip=False, chunk_len=4)),
    Case("ssd activation", lambda: SSD(8, 2, d_state=4, activation="silu", chunk_len=4)),
    Case("ssd moved", lambda: move(SSD(8, 2, d_state=4, chunk_len=4))),
    Case("attention partly rotated", lambda: PartialRotary(16, 2, share=0.25), d_model=16),
    Case("attention normed q and k", lambda: NormedAttention(8, 2)),
    Case("attention near identity", lambda: NearIdentityAttention(8, 2)),
    Case("attention, q and k near identity", lambda: AlignedAttention(8, 2)),
    Case("attention shifted keys", lambda: ShiftedKeys(8, 2), kind="sequence"),
    Case("attention convolved", lambda: ConvolvedAttention(8, 2), kind="sequence"),
]


def transform(
    name: str,
    build: Callable[[], nn.Module],
    dead: Mapping[str, Reach] | None = None,
    verdicts: Mapping[str, Outcome] | None = None,
) -> Case:
    return Case(name, build, dead or {}, verdicts or {}, kind="transform")


def make_cdmoe(**options: Any) -> CDMoE:
    return CDMoE(8, n_experts=12, n_retrieval_heads=2, k=3, d_retrieval=6, **options)


def make_peer(**options: Any) -> PEER:
    return PEER(8, n_experts=12, n_retrieval_heads=2, k=3, d_retrieval=6, **options)


def make_routed(**options: Any) -> RoutedMoE:
    return RoutedMoE(8, **{"d_ff": 5, **options})


TRANSFORMS = [
    transform("mlp", lambda: MLP(8)),
    transform("mlp gated", lambda: MLP(8, gated=True, activation="gelu")),
    transform("mlp relu", lambda: MLP(8, activation="relu")),
    transform("cdmoe form one score inside", lambda: make_cdmoe(form="one", score="inside")),
    transform("cdmoe form one score outside", lambda: make_cdmoe(form="one")),
    transform("cdmoe form one score raw", lambda: make_cdmoe(form="one", score="raw")),
    transform("cdmoe form two score inside", lambda: make_cdmoe(score="inside")),
    transform("cdmoe form two score outside", make_cdmoe),
    transform("cdmoe form two score raw", lambda: make_cdmoe(score="raw")),
    transform("cdmoe gated", lambda: make_cdmoe(gated=True)),
    transform("cdmoe zero keys", lambda: make_cdmoe(key_init="zeros"), TIED_QUERY, TIES | WAITS),
    transform(
        "cdmoe as printed",
        lambda: make_cdmoe(key_init="zeros", score="inside"),
        TIED_QUERY | ZERO_EXPERTS,
        TIES | WAITS,
    ),
    transform("cdmoe gather", lambda: make_cdmoe(backend="gather")),
    transform("cdmoe dense", lambda: make_cdmoe(backend="dense")),
    transform("peer softmax", make_peer),
    transform("peer relu", lambda: make_peer(score_activation="relu")),
    transform("peer sigmoid", lambda: make_peer(score_activation="sigmoid")),
    transform("peer gather", lambda: make_peer(backend="gather")),
    transform("peer dense", lambda: make_peer(backend="dense")),
    transform("peer normalised", lambda: make_peer(query_norm="batch").eval()),
    transform("routed", make_routed),
    transform("routed gated", lambda: make_routed(gated=True)),
    transform("routed normalised", lambda: make_routed(normalise=True)),
    transform("routed to one", lambda: make_routed(k=1, normalise=True), {"router.weight": "zero"}),
    transform("routed loop", lambda: make_routed(backend="loop")),
    transform(
        "routed grouped",
        # In fp32: the kernel has no fp64, so there is nothing to hold its precision to.
        lambda: make_routed(d_ff=8, backend="grouped_mm"),
        verdicts={"precision": "not decided", **JUMPS},
    ),
    transform("shared experts", lambda: SharedExpertMoE(8, d_ff=5)),
    transform("two shared experts", lambda: SharedExpertMoE(8, d_ff=5, n_shared=2, k=2)),
]


def list_dead_of_mask(block: int) -> dict[str, Reach]:
    return {f"model.blocks.{block}.mixer.{name}": how for name, how in ZERO_A.items()}


MODELS = [
    Case(
        name,
        lambda name=name, sizes=sizes: build_architecture(name, **sizes),
        dead,
        WAITS | verdicts,
        kind="model",
        lengths=(1, 6),
    )
    for name, sizes, dead, verdicts in (
        ("cheems", {"n_experts": 12, "d_retrieval": 6, "d_state": 4}, list_dead_of_mask(7), JUMPS),
        ("doge", {"n_experts": 12, "d_retrieval": 6}, list_dead_of_mask(0), {}),
        ("llama", {"n_experts": 3}, {}, {}),
        ("mamba2", {"n_experts": 3, "d_state": 4}, {}, {}),
        ("jamba", {"n_experts": 3, "d_state": 4}, {}, {}),
    )
]

PRINTED = [
    Case(
        "printed R6 dynamic base",
        lambda: DynamicBaseAttention(8, max_position=4),
        verdicts={"causal": "fails"},
        kind="printed",
    ),
    Case(
        "printed R7 bf16 angles",
        lambda: RoundedRotationAttention(8),
        verdicts={"precision": "fails"},
        kind="printed",
    ),
    Case(
        "printed S2 sum over the target chunk",
        lambda: TargetSummedSSD(8, chunk_len=4),
        verdicts={"causal": "fails", "matrix applies": "not applicable"},
        kind="printed",
    ),
    Case(
        "printed D2 mask after the softmax",
        lambda: MaskAfterSoftmaxAttention(8),
        {"l": "zero"},
        # What later tokens take of a sum of one fades towards the end: outputs grow with t / T.
        {"causal": "fails", "stable": "fails"},
        kind="printed",
    ),
    Case(
        "printed C4 floor of the root",
        lambda: FloorSquareCDMoE(8, n_experts=11, k=3, n_retrieval_heads=2, d_retrieval=6),
        verdicts={"table reach": "fails", "matrix applies": "not applicable"},
        kind="printed",
    ),
]
"""The literal readings that are layers of their own: each breaks the law that its erratum says."""

CASES = [*MIXERS, *TRANSFORMS, *MODELS, *PRINTED]
