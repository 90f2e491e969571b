"""Targets of `lab certify` that break a law, or that hang, crash or exhaust the memory."""

import ctypes
import os
import time

import torch
from torch import nn

TERABYTE = 2**40


class Leaky(nn.Module):
    """Reads the whole sequence, and prints."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x):
        print('{"not": "an event"}')
        return self.map(x) + x.mean(1, keepdim=True)


class Fragile(nn.Module):
    """Hangs in training, crashes at long lengths, exhausts the memory in long fp32; else right."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x):
        length = x.shape[1]
        if length == 7:
            raise RuntimeError("seven is not taken")
        if self.training and x.dtype == torch.float64 and length > 2:
            time.sleep(600)
        if length > 300:
            ctypes.string_at(0)
        if x.dtype == torch.float32 and length > 100:
            torch.empty(TERABYTE, dtype=torch.int8)
        return self.map(x)


class Nothing(nn.Module):
    def forward(self, x):
        return x * float("nan")


class Leaving(nn.Module):
    def forward(self, x):
        os._exit(3)
