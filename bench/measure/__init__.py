"""One run: preconditions, warm-up, two interleaved arms, verdict. Start with run.py."""
