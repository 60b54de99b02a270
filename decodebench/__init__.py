"""DecodeBench in Python: load a model, generate with any method, measure it. Start with ``load``."""

from bench import __version__
from bench.errors import RunFailed, UserError
from decodebench.catalogue import methods
from decodebench.generation import Generation, generate
from decodebench.measurement import Measurement, Measurements, benchmark, compare
from decodebench.target import Target, load

__all__ = [
    "Generation",
    "Measurement",
    "Measurements",
    "RunFailed",
    "Target",
    "UserError",
    "__version__",
    "benchmark",
    "compare",
    "generate",
    "load",
    "methods",
]
