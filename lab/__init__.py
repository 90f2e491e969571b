"""Small sequence models on synthetic tasks: layers, training, and what they learned.

Axis letters, used in every shape of this package:

    b batch          t target time    s source time    c chunk       l within chunk
    d model          h head           p head dim       n state       g group
    e expert         k chosen         r retrieval      v vocabulary  q scored position

The paper's symbols keep their case: A, B, C, D, dt, L, M.
"""

__version__ = "0.1.0"
