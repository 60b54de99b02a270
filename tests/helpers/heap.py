"""What the tests have loaded, out of every garbage collection: one takes half a second with everything imported, and a
run makes many. A process that measures once has no such heap.
"""

from __future__ import annotations

import gc

unfreeze = gc.unfreeze  # a run ends with it
_calls = 0


def keep_frozen() -> None:
    """From now on ``gc.unfreeze`` leaves the heap frozen, and looks for garbage in it at every fourth call."""
    gc.unfreeze = _collect_now_and_then
    freeze()


def freeze() -> None:
    """Look for garbage once, and leave what is alive out of later collections."""
    unfreeze()
    gc.collect()
    gc.freeze()


def _collect_now_and_then() -> None:
    global _calls
    _calls += 1
    if _calls % 4 == 0:
        freeze()
