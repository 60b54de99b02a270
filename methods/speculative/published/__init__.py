"""Reads checkpoints in the formats their authors published."""
