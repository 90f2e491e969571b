"""The laws that every causal model must obey, and `certify`, which tries them on any module.

A law tries a module from [b t d] to [b t …] on probes and compares outputs that must agree. They
agree if they differ by no more than the module's own noise floor, measured in fp64 where the module
runs in fp64: if rounding the input moves the output by n, differences of about n are no fault.

To add a law, define a `Law` in the file of its subject (its name, the function that judges it, and
the conditions under which it is tried), and add one line to the list in `lab.laws.certification`.
"""

from lab.certify_settings import CONDITIONS as CONDITIONS
from lab.certify_settings import QUICK as QUICK
from lab.certify_settings import THOROUGH as THOROUGH
from lab.certify_settings import CertifySettings as CertifySettings
from lab.certify_settings import Condition as Condition
from lab.laws.certification import LAWS as LAWS
from lab.laws.certification import Certification as Certification
from lab.laws.certification import assert_lawful as assert_lawful
from lab.laws.certification import certify as certify
from lab.laws.gradient import Reach as Reach
from lab.laws.gradient import reach as reach
from lab.laws.law import Law as Law
from lab.laws.law import Outcome as Outcome
from lab.laws.law import Verdict as Verdict
from lab.laws.noise import in_double as in_double
from lab.laws.noise import noise_floor as noise_floor
from lab.laws.probes import Probes as Probes
