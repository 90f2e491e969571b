# pip install transformers==5.23.0
"""Decoding: RoBERTa's positions begin at padding_idx + 1 (modeling_roberta.py:155), those that
`generate` gives it at 0 (generation/utils.py:2888); CamemBERT, XLM-RoBERTa and four more alike."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
given = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6, "pad_token_id": 1}
given |= {"output_logits": True, "return_dict_in_generate": True}
worst = {"Bert": 0.0, "Roberta": 0.0, "Camembert": 0.0, "XLMRoberta": 0.0}
for name in worst:
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_attention_heads=4, is_decoder=True, pad_token_id=1, initializer_range=0.2
    )
    torch.manual_seed(0)
    kind = "BertLMHeadModel" if name == "Bert" else f"{name}ForCausalLM"
    model = getattr(transformers, kind)(config).double().eval()
    ids = torch.randint(3, 48, (1, 12))
    with torch.no_grad():
        found = model.generate(ids, **given)
        whole = model(found.sequences).logits[:, 11:-1]
    worst[name] = ((torch.stack(found.logits, 1) - whole).abs().max() / whole.abs().max()).item()
    print(f"{name}: logits of generate and of forward differ by {worst[name]:.1e}")
sys.exit(max(worst.values()) > 1e-3)
