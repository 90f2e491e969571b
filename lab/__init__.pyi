from lab.api.options import AnalyzeOptions as AnalyzeOptions
from lab.api.profiling import profile as profile
from lab.api.run import analyze as analyze
from lab.api.run import open as open
from lab.api.sweeping import sweep as sweep
from lab.api.training import train as train
from lab.laws import certify as certify

__version__: str
