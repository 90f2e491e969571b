"""The paper's accuracies on hard recall, with which `lab reproduce recall` compares its own.

They are read off the authors' figure of accuracy on hard MQAR (§ Effect of Modules), which prints
no numbers, to ±0.02. At d_model 32 and 512 tokens or more, all lines are near 0.
"""

READING_ERROR = 0.02
"""Maximum error of a number read off the figure."""
PAPER_MIXERS = ("dynamic mask attention", "attention", "SSD", "Based")
"""The order of the numbers below. SSD has no convolution, no gate, and a state of 128."""

_AS_READ = {
    256: ((0.55, 0.51, 0, 0.21), (1, 0.68, 0.55, 0.52), (1, 0.90, 0.89, 0.82), (1, 1, 1, 0.96)),
    512: ((0, 0, 0, 0), (0.79, 0.65, 0.41, 0.25), (1, 0.73, 0.72, 0.64), (1, 1, 1, 0.82)),
    1024: ((0, 0, 0, 0), (0.18, 0.11, 0.04, 0.04), (1, 0.60, 0.60, 0.27), (1, 0.99, 0.97, 0.62)),
    2048: ((0, 0, 0, 0), (0.16, 0.09, 0, 0), (1, 0.19, 0.12, 0.04), (1, 0.36, 0.32, 0.17)),
}
"""Row length → for each width the accuracies of the mixers above."""

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
    "SSD, RoPE, short then long memory": "SSD",
}
"""Our mixer → the paper's; other mixers have no number in the figure."""
