"""Data sets as tasks: which prompts there are, how they are put to a model, how answers are scored."""

from __future__ import annotations

from bench.tasks.base import Example, Task
from bench.tasks.chat import Demo, Jsonl, MTBench, SpecBench
from bench.tasks.exercises import Gsm8k, HumanEval
from bench.tasks.texts import WMT14, CnnDailyMail, NQOpen, XSum

__all__ = [
    "CnnDailyMail",
    "Demo",
    "Example",
    "Gsm8k",
    "HumanEval",
    "Jsonl",
    "MTBench",
    "NQOpen",
    "SpecBench",
    "Task",
    "WMT14",
    "XSum",
]
