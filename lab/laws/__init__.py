"""What every causal model must obey, as functions that return a verdict.

Each law tries a module from [b t d] to [b t …] on probes and compares outputs that must agree.
"Agree" is measured against the module's own noise floor, in fp64 where the module can run so:
a module whose output moves by n when its input is rounded cannot be held to less than n.
"""

from lab.laws.asserting import assert_lawful as assert_lawful
from lab.laws.budget import QUICK as QUICK
from lab.laws.budget import Budget as Budget
from lab.laws.conditions import CONDITIONS as CONDITIONS
from lab.laws.conditions import Condition as Condition
from lab.laws.examination import LAWS as LAWS
from lab.laws.examination import Examination as Examination
from lab.laws.examination import certify as certify
from lab.laws.gradient import Reach as Reach
from lab.laws.gradient import gradient_reach as gradient_reach
from lab.laws.gradient import reach as reach
from lab.laws.matrix import MatrixMixer as MatrixMixer
from lab.laws.probes import Probes as Probes
from lab.laws.probes import in_double as in_double
from lab.laws.probes import noise_floor as noise_floor
from lab.laws.verdict import Outcome as Outcome
from lab.laws.verdict import Verdict as Verdict
