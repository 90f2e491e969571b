"""Models of other libraries, opened: read, changed and trained like the lab's own."""

from lab.foreign.opening import open_model

open = open_model
