"""Does speculative sampling cost accuracy? The experiments that answer it: ``python -m bench lossless --help``."""
