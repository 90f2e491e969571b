# pip install transformers==5.23.0
"""Padding: in a step without an image, GIT widens the mask by the tokens of an image, which the
cache does not hold (modeling_git.py:841), so left padding is seen and other tokens are not."""

import sys
from importlib import import_module

import torch

transformers = import_module("transformers")
sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
given = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6, "pad_token_id": 0}
given |= {"output_logits": True, "return_dict_in_generate": True}
config = transformers.GitConfig(**sizes, num_attention_heads=4, initializer_range=0.2)
torch.manual_seed(0)
model = transformers.GitForCausalLM(config).double().eval()
ids = torch.randint(3, 48, (1, 12))
worst = {0: 0.0, 6: 0.0}
for padding in worst:
    padded = torch.cat([torch.zeros(1, padding, dtype=torch.long), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= padding).long()[None]
    with torch.no_grad():
        found = model.generate(padded, attention_mask=mask, **given)
        whole = model(found.sequences[:, padding:]).logits[:, 11:-1]
    error = (torch.stack(found.logits, 1) - whole).abs().max() / whole.abs().max()
    worst[padding] = error.item()
print(f"with six tokens of left padding, logits differ by {worst[6]:.1e}", end=" ")
print(f"(without padding {worst[0]:.1e})")
sys.exit(worst[6] > 1e-3)
