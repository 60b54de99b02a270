"""Errors a user can act on: what came, what is allowed, what to do."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The command line prints the message alone and exits with code 2."""


class RunFailed(Exception):
    """A run that broke on its way (out of memory, full disk). Message alone, exit code 1; samples are kept."""
