"""The law of tables: rows that nothing selects are found, rare ones are not called so."""

from itertools import chain, repeat

import pytest
import torch
from torch import Tensor, nn

from lab.laws import LAWS, CertifySettings, Probes, Verdict, tables
from lab.layers.cdmoe import CDMoE
from lab.layers.printed import FloorSquareCDMoE


def judge(module: nn.Module, d_model: int = 8, seconds: float = 60.0) -> Verdict:
    settings = CertifySettings(d_model, (1, 16), batch=2, seconds=seconds)
    return LAWS["table reach"].judge(module.double(), Probes(settings))


class Looked(nn.Module):
    """Adds to each token a row of a table, that its first channel chooses."""

    def __init__(self, rows: int, reachable: int, width: float = 0.1):
        super().__init__()
        self.table = nn.Embedding(rows, 8)
        self.reachable, self.width = reachable, width

    def forward(self, x: Tensor) -> Tensor:
        row = (x[..., 0].abs() / self.width).long().clamp(max=self.reachable - 1)
        return x + self.table(row)


class Positioned(nn.Module):
    """Adds to each token the row of its position."""

    def __init__(self, rows: int):
        super().__init__()
        self.table = nn.Embedding(rows, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[1]))


@pytest.mark.parametrize(("rows", "reachable"), [(8, 7), (64, 47), (20, 1)])
def test_rows_that_nothing_selects_are_counted(rows: int, reachable: int):
    found = judge(Looked(rows, reachable))
    assert found.verdict == "fails"
    words = f"tokens reaches {rows - reachable} of {rows} rows of table.weight: {reachable}"
    assert found.counterexample is not None
    assert words in found.counterexample


def test_rare_rows_are_reached_with_patience():
    # The last row needs a channel of 60, 3.75 deviations at the largest scale: once in 20,000.
    module = Looked(60, 60, width=60 / 59)
    assert judge(module, seconds=1e-9).verdict == "not decided"
    assert judge(module).verdict == "holds"


@pytest.mark.parametrize(("rows", "outcome"), [(128, "holds"), (4096, "not decided")])
def test_rows_that_positions_select_are_no_fault(rows: int, outcome: str):
    assert judge(Positioned(rows)).verdict == outcome


def test_printed_experts_are_unreachable():
    # Erratum C4: ⌊√3072⌋² = 3025.
    torch.manual_seed(0)
    found = judge(FloorSquareCDMoE(64, n_experts=3072, n_retrieval_heads=8), d_model=64)
    assert found.verdict == "fails"
    assert found.counterexample is not None
    assert found.counterexample.endswith(
        "tokens reaches 47 of 3072 rows of down: 3025, 3026, 3027 …; "
        "47 of 3072 rows of up: 3025, 3026, 3027 …"
    )


def test_factored_experts_are_all_reachable():
    torch.manual_seed(0)
    assert judge(CDMoE(64, n_experts=3072), d_model=64).verdict == "holds"


@pytest.mark.parametrize(
    ("name", "outcome"), [("token_type_embeddings", "holds"), ("types", "fails")]
)
def test_rows_that_only_an_optional_input_selects_are_no_fault(name: str, outcome: str):
    class Typed(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(name, nn.Embedding(2, 8))

        def forward(self, x: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
            types = x[..., 0].long() * 0 if token_type_ids is None else token_type_ids
            return x + self.get_submodule(name)(types)

    assert judge(Typed()).verdict == outcome


class Routed(nn.Module):
    """Adds the output of one expert of four, which a router that begins at zero chooses."""

    def __init__(self, n_chosen_among: int):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))
        self.n_chosen_among = n_chosen_among
        nn.init.zeros_(self.router.weight)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)[..., : self.n_chosen_among].sigmoid()
        best, chosen = scores.max(-1, keepdim=True)
        return x + best * torch.einsum("bti,btij->btj", x, self.experts[chosen[..., 0]])


def test_a_router_of_zeros_fails_and_is_said_to_reach_every_expert_once_it_has_moved():
    torch.manual_seed(0)
    found = judge(Routed(4))
    assert found.verdict == "fails"
    assert "9 of 36 rows" in found.evidence
    assert "with constant parameters moved, 36 of 36 rows" in found.evidence
    assert "a first step may part equal choices" in found.evidence


def test_an_expert_that_no_router_chooses_stays_unreached():
    torch.manual_seed(0)
    found = judge(Routed(3))
    assert found.verdict == "fails"
    assert "with constant parameters moved, none" in found.evidence
    assert "of 256 tokens reaches 8 of 32 rows of experts: [3, 0]" in found.evidence


def test_with_constants_moved_a_module_gets_only_what_is_left_of_the_time(monkeypatch):
    torch.manual_seed(0)
    # The first pass asks thrice: when it begins, and after its first two rounds of three.
    clock = chain(repeat(0.0, 3), repeat(61.0))
    monkeypatch.setattr(tables, "read_clock", lambda: next(clock))
    found = judge(Routed(3), seconds=60.0)
    assert found.verdict == "fails"
    assert "with constant parameters moved, 27 of 36 rows got a gradient from 64" in found.evidence


def test_what_has_no_table_has_none_to_reach():
    assert judge(nn.Identity()).verdict == "not applicable"


class Unused(nn.Module):
    """A module beside a table that it does not use."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.spare = module, nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class Shared(nn.Module):
    """Two embeddings with one table, of which only the second keeps a row from learning."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(4, 8), nn.Embedding(4, 8, padding_idx=3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second((x[..., 0].abs() * 2).long().clamp(max=2))


def test_a_shared_table_has_the_row_of_padding_of_either():
    found = judge(Shared())
    assert found.verdict == "holds"
    assert "4 of 4 rows" in found.evidence


def test_tables_without_any_gradient_are_left_to_gradient_reach():
    found = judge(Unused(nn.Identity()))
    assert found.verdict == "not applicable"
    assert found.evidence == (
        "no table gets a gradient from 64 tokens, which gradient reach judges"
    )
    found = judge(Unused(nn.Linear(8, 8)))
    assert found.verdict == "holds"
    assert found.evidence == (
        "8 of 8 rows got a gradient from 64 tokens (not counting spare, which got none at all)"
    )


def test_a_gradient_that_is_not_a_number_reaches_no_row():
    class Undefined(Looked):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.nan

    assert judge(Undefined(8, 8)).verdict == "not applicable"
