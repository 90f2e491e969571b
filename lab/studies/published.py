"""The paper's hard recall, as published: what `lab reproduce recall` puts beside its own numbers.

Read off the authors' figure of accuracy on hard MQAR (§ Effect of Modules), which prints no
numbers: each is good to ±0.02. At d_model 32 and 512 tokens or more, all lines lie near 0.
"""

READING_ERROR = 0.02
"""How far a number read off the figure may be from the one that was plotted."""
PAPER_MIXERS = ("dynamic mask attention", "attention", "SSD", "Based")
"""In the order of the numbers below. SSD has no convolution, no gate, and a state of 128."""

_AS_READ = {
    256: ((0.55, 0.51, 0, 0.21), (1, 0.68, 0.55, 0.52), (1, 0.90, 0.89, 0.82), (1, 1, 1, 0.96)),
    512: ((0, 0, 0, 0), (0.79, 0.65, 0.41, 0.25), (1, 0.73, 0.72, 0.64), (1, 1, 1, 0.82)),
    1024: ((0, 0, 0, 0), (0.18, 0.11, 0.04, 0.04), (1, 0.60, 0.60, 0.27), (1, 0.99, 0.97, 0.62)),
    2048: ((0, 0, 0, 0), (0.16, 0.09, 0, 0), (1, 0.19, 0.12, 0.04), (1, 0.36, 0.32, 0.17)),
}
"""By row length, for each width the numbers of the mixers above."""

PUBLISHED: dict[tuple[str, int, int], float] = {
    (mixer, seq_len, d_model): float(accuracy)
    for seq_len, by_width in _AS_READ.items()
    for d_model, accuracies in zip((32, 64, 128, 256), by_width, strict=True)
    for mixer, accuracy in zip(PAPER_MIXERS, accuracies, strict=True)
}
"""Test accuracy in [0, 1] by mixer, row length and d_model."""

COUNTERPARTS = {
    "attention": "attention",
    "value mask": "dynamic mask attention",
    "soft mask": "dynamic mask attention",
    "straight-through mask": "dynamic mask attention",
    "literal mask": "dynamic mask attention",
    "SSD, RoPE": "SSD",
}
"""Which of the paper's mixers each of ours stands for; the others have no number in the figure."""
