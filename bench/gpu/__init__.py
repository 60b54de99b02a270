"""Measure on a machine with a GPU and no network: pack what it lacks, run stages there, import what comes back."""
