"""Mixers that keep or break the contract of `--model`, each in one way."""

import torch
from torch import nn


class Good(nn.Module):
    def __init__(self, d_model: int, width=4):
        super().__init__()
        self.map = nn.Linear(d_model, d_model)
        self.width = width

    def forward(self, x):
        return self.map(x)


class Wrong(Good):
    def forward(self, x):
        return self.map(x)[..., :1]


class Pair(Good):
    def forward(self, x):
        return None, self.map(x)


class Raising(Good):
    def forward(self, x):
        raise FileNotFoundError("no weights")


class Verbose(Good):
    def forward(self, x):
        raise RuntimeError("no weights\n" * 10_000)


class Unbuildable(Good):
    def __init__(self, d_model: int, depth):
        super().__init__(d_model)


class NoMatrix(Good):
    def matrix(self, x):
        raise RuntimeError("not today")

    def values(self, x):
        return x[:, None]

    def project(self, x, z):
        return torch.zeros_like(x)
