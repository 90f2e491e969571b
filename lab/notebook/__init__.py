"""Train and read runs from Python: what `lab.train` and `lab.open` return shows itself."""

from lab.notebook.opening import open as open
from lab.notebook.sweeping import sweep as sweep
from lab.notebook.training import train as train
