# pip install reformer-pytorch==1.4.4
"""Gradient: a Reformer that evaluates has none, as it keeps the random numbers' state only in
training (reversible.py:59) and puts it back always (:77); three sister packages do so too."""

import sys
from importlib import import_module

import torch

reformer = import_module("reformer_pytorch").Reformer
shows = False
for training in (True, False):
    module = reformer(16, 2, heads=2, bucket_size=4, ff_chunks=1).train(training)
    x = torch.randn(1, 8, 16, requires_grad=True)
    try:
        module(x).sum().backward()
        print(f"{training=}: a gradient")
    except TypeError as error:
        print(f"{training=}: {error}")
        shows = True
sys.exit(shows)
