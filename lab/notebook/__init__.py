"""Train and read runs from Python: what `lab.train` returns shows itself in a notebook."""

from lab.notebook.training import train as train
