"""Helpers that know nothing of benchmarks: files, progress, statistics, machine."""
