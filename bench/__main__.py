"""``python -m bench``."""

from __future__ import annotations

import sys

from bench.errors import report_failure


def main() -> int:
    """Run the command line; a package that is not installed is one message."""
    try:
        from bench import cli
    except ModuleNotFoundError as error:
        return report_failure(error)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
