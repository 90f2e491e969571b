"""Measure how much of their mass queries and values put on their pair, head by head."""

import numpy as np
import torch
from jaxtyping import Float, Int

from analysis.base import Subject
from analysis.links import Offsets, find_offsets, find_pairs
from analysis.mixing import Mixer, collect_mixers
from analysis.recall.pair_mass import PairMass
from analysis.statistics.intervals import bootstrap
from lab.laws import MatrixMixer
from tasks.base import count_rows

MASS_TOKENS = 16_384
"""Tokens of the rows whose matrices are read. Matrices are quadratic in a row's length, and rows
are much alike."""
MASS_ROWS = 64
"""Maximum number of rows that are read, however short."""


@torch.no_grad()
def measure_pair_mass(subject: Subject) -> PairMass | None:
    """Measure every head's mass on pairs; None where no mixer offers a matrix."""
    size, seq_len = subject.batch.inputs.shape
    rows = min(size, count_rows(MASS_TOKENS, seq_len, fewest=2, most=MASS_ROWS))
    batch = subject.batch[slice(0, rows)]
    query, key, value = (link.cpu().numpy() for link in find_pairs(batch))
    rng, offsets = np.random.default_rng(subject.seed), find_offsets(subject)
    layers, heads, names, shares, intervals, without = [], [], [], [], [], []
    for mixer in collect_mixers(subject.model, batch):
        if not isinstance(mixer.module, MatrixMixer):
            without.append(mixer.layer)
            continue
        # [b 3 h]: means over a row's pairs; intervals resample the rows.
        by_row = np.stack(
            [
                _measure_row(mixer, row, query[row], key[row], value[row], offsets)
                for row in range(rows)
            ]
        )
        for head in range(by_row.shape[2]):
            layers.append(mixer.layer)
            heads.append(head)
            names.append(mixer.kind)
            shares.append(by_row[:, :, head].mean(0))
            intervals.append([bootstrap(by_row[:, i, head], rng) for i in range(3)])
    if not layers:
        return None
    real = query >= 0
    on_asked, on_stored = (
        float(np.mean([(1 / (p[row, real[row]] + 1)).mean() for row in range(rows)]))
        for p in (query, value)
    )
    return PairMass(
        layers=np.array(layers),
        heads=np.array(heads),
        mixers=tuple(names),
        share=np.array(shares, dtype=np.float64),
        interval=np.array(intervals, dtype=np.float64),
        chance=np.array([on_asked, on_asked, on_stored]),
        rows=rows,
        without=tuple(without),
        offsets=offsets,
    )


def _measure_row(
    mixer: Mixer,
    row: int,
    query: Int[np.ndarray, " pairs"],
    key: Int[np.ndarray, " pairs"],
    value: Int[np.ndarray, " pairs"],
    offsets: Offsets,
) -> Float[np.ndarray, "3 h"]:
    """Return the mean shares of one row of the batch, by blocks of its matrix."""
    real = query >= 0
    query, key, value = query[real], key[real], value[real]
    later, bound = (value + offset for offset in offsets.get(mixer.layer))
    targets = torch.from_numpy(np.concatenate([query, query, bound]))
    sources = torch.from_numpy(np.concatenate([later, key, key]))
    # A query has no entry at a position after its own, nor a row any at one past its end.
    there = (sources <= targets) & (targets < mixer.x.shape[1])
    found = mixer.measure_shares(row, targets.where(there, 0), sources.where(there, 0)) * there
    return found.unflatten(1, (3, -1)).mean(2).T.numpy()
