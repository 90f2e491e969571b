"""Rare inputs: tokens that a module treats apart, named or not, and rows that are alike."""

import pytest
import torch
from torch import nn

from lab.laws import CONDITIONS, Certification, CertifySettings
from lab.laws.causal import find_token_suspect, list_special
from lab.laws.tokens import encode_token, encode_tokens, to_token_ids
from tests.planted import FAULTS
from tests.planted.models import TokenModel
from tests.planted.routing import RightExperts


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return next(fault for fault in FAULTS if fault.name == name).build()


@pytest.mark.parametrize(
    ("name", "token"), [("separators counted from the end", 2017), ("named separators so", 1234)]
)
def test_a_separator_that_moves_earlier_outputs_is_found(name: str, token: int):
    settings = CertifySettings(lengths=(2,), conditions=CONDITIONS[:1])
    found = Certification(build(name), settings).judge("causal")
    assert found.verdict == "fails"
    words = (
        f"length 2: token {token} from position 1 to 1 in place of others moves output 0 of row 0"
    )
    if name == "separators counted from the end":
        words = f"length 2: token {token} at position 1 in place of another moves output 0 of row 0"
    assert found.counterexample == words


def test_experts_that_similar_rows_fill_are_found():
    settings = CertifySettings(16, (2,), conditions=CONDITIONS[:1], seconds=0.3)
    found = Certification(build("capacity that similar rows exceed"), settings).judge(
        "batch-invariant"
    )
    assert found.verdict == "fails"
    words = "length 2: in a batch of 65 similar rows, output 0 of a row moves"
    assert found.counterexample == words
    torch.manual_seed(0)
    right = Certification(RightExperts(), settings).judge("batch-invariant")
    assert right.verdict == "holds"


@torch.no_grad()
def test_the_search_ends_with_its_time_and_finds_nothing_in_a_right_model():
    certification = Certification(build("separators counted from the end"), CertifySettings())
    module, probes = certification._bring_to(CONDITIONS[0], True)
    assert find_token_suspect(module, probes.input(2), seconds=-1) is None
    torch.manual_seed(0)
    right = Certification(TokenModel(), CertifySettings(lengths=(2,)))
    assert right.judge("causal").verdict == "holds"


def test_tokens_are_named_by_modules_classes_and_configurations():
    class Config:
        decoder_start_token_id = 9
        hidden_size = 11

    model = TokenModel()
    model.eot_id, model.layer_idx, model.config = 7, 8, Config()  # type: ignore[assignment]
    model.mixer.config = {"a configuration": "without attributes"}  # type: ignore[assignment]
    module, _ = Certification(model, CertifySettings())._bring_to(CONDITIONS[0], True)
    assert [special and special["token"] for special in list_special(module)] == [0, 1, 7, 9, 39]


@pytest.mark.parametrize("skip", [-1, 0, 5, 16])
def test_many_tokens_are_encoded_as_one_is(skip: int):
    tokens = torch.tensor([token for token in range(17) if token != skip])
    vectors = encode_tokens(30, tokens, 17, skip)
    assert torch.equal(to_token_ids(vectors, 17, None if skip < 0 else skip), tokens)
    alone = torch.stack([encode_token(30, token, 17, skip) for token in tokens.tolist()])
    assert torch.equal(vectors, alone)
