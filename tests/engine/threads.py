"""Number of torch's threads in a part of a test."""

import contextlib

import torch


@contextlib.contextmanager
def threads(number):
    """Let torch use so many threads; restore the number on exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
