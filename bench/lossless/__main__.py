"""``python -m bench.lossless``, the same as ``python -m bench lossless``."""

import sys

from bench.lossless.command import main

if __name__ == "__main__":
    sys.exit(main())
