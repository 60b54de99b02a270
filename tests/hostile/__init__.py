"""Inputs and events that should break the suite: ``make test-hostile``; ``make test`` leaves them out."""
