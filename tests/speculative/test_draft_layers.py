"""What draft networks of Llama layers share: states that wait to be read."""

from __future__ import annotations

import torch

from methods.drafting import Context
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling
from methods.speculative.draft_layers import Unread, slots_of


def after(lengths, path):
    """A pass after which rows have so many tokens, the root included."""
    tokens = [[0] * length for length in lengths]
    paths = None if path is None else torch.tensor(path)
    return Context(tokens, torch.zeros(len(lengths), dtype=torch.long), None, paths, Sampling(), torch.Generator())


def states(first, rows, nodes):
    """One number for each node, as a state of width 1."""
    return [first + torch.arange(rows * nodes, dtype=torch.double).view(rows, nodes, 1)]


def test_states_of_one_pass_are_those_of_its_kept_nodes():
    unread = Unread(2)
    unread.note(after([4, 3], None), states(0, 2, 3))
    counts, (found,) = unread.take()
    assert counts == [3, 2] and found[:, :, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    unread.note(after([6, 4], [[0, 2, -1], [0, -1, -1]]), states(100, 2, 4))
    counts, (found,) = unread.take()
    assert counts == [2, 1] and found[0, :, 0].tolist() == [100, 102] and found[1, 0, 0] == 104


def test_states_of_several_passes_follow_one_another_in_each_row():
    """Rows keep different numbers of nodes, one ends, and one leaves on the way."""
    unread = Unread(3)
    unread.note(after([3, 4, 2], None), states(0, 3, 3))
    unread.note(after([5, 4, 3], [[0, 3, -1], [0, -1, -1], [0, -1, -1]]), states(100, 3, 4))
    unread.keep_rows([2, 0])
    unread.note(after([6, 6], [[0, 1, 2], [0, -1, -1]]), states(200, 2, 3))
    assert len(unread) == 3
    counts, (found,) = unread.take()
    rows = [found[row, :count, 0].tolist() for row, count in enumerate(counts)]
    assert rows == [[6, 108, 200, 201, 202], [0, 1, 100, 103, 203]]
    assert len(unread) == 0


def test_the_last_places_are_taken_alone_and_the_others_stay():
    unread = Unread(2)
    unread.note(after([4, 2], None), states(0, 2, 3))
    unread.note(after([6, 2], [[0, 3], [0, -1]]), states(100, 2, 4))
    counts, (found,) = unread.take_last(3)
    assert counts == [3, 1] and found[0, :, 0].tolist() == [2, 100, 103] and found[1, 0, 0] == 3
    counts, (found,) = unread.take()
    assert counts == [2, 0] and found[0, :2, 0].tolist() == [0, 1]
    assert len(unread) == 0


def test_places_that_a_row_does_not_have_stay_within_the_cache():
    """A row at its limit beside one that has much to read."""
    cache = Cache([0], 2, 12, 1, 4, dtype=torch.double, device=torch.device("cpu"))
    cache.set_lengths([10, 2])
    found = slots_of(cache, 8)
    assert found.max() == 11 and found[1].tolist() == list(range(2, 10))
    cache.write(0, torch.ones(2, 8, 2, 4, dtype=torch.double), found)
    cache.set_lengths([3, 3])
    assert slots_of(cache, 8) is None
