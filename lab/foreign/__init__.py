"""Models of other libraries, opened: read, changed and trained like the lab's own."""

from lab.foreign.opened import OpenedModel as OpenedModel
from lab.foreign.opening import KINDS as KINDS
from lab.foreign.opening import open_model as open_model
