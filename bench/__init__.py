"""The benchmark: from a configuration to records and numbers. ``python -m bench --help``."""

__version__ = "0.1.0"
