"""Rates and verdicts, computed from records alone; needs no GPU and no torch."""
