"""Data sets as tasks: which prompts there are, how they are put to a model, how answers are scored."""

from __future__ import annotations

from bench.tasks.base import Example, Task
from bench.tasks.chat import Demo, HubPrompts, Jsonl, MTBench, SpecBench
from bench.tasks.exercises import Gsm8k, HumanEval
from bench.tasks.seq2seq import (
    WMT16,
    CnnDailyMailArticles,
    HubPairs,
    Iwslt17,
    Multi30k,
    Multi30kReversed,
    WMT14Pairs,
    XSumArticles,
)
from bench.tasks.single_turn import WMT14, CnnDailyMail, NQOpen, XSum

__all__ = [
    "CnnDailyMail",
    "CnnDailyMailArticles",
    "Demo",
    "Example",
    "Gsm8k",
    "HubPairs",
    "HubPrompts",
    "HumanEval",
    "Iwslt17",
    "Jsonl",
    "MTBench",
    "Multi30k",
    "Multi30kReversed",
    "NQOpen",
    "SpecBench",
    "Task",
    "WMT14",
    "WMT14Pairs",
    "WMT16",
    "XSum",
    "XSumArticles",
]
