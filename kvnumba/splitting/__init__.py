"""Splitting a batch into ubatches, and bringing results back into the order of the batch.

A ubatch is what a cache places and a model computes in one go. Whatever the way of splitting,
every token is in exactly one ubatch, no ubatch has more than `n_ubatch` tokens, and the tokens of
a sequence stay in the order of the batch (`split_seed` has an order of its own).

Source: spec/llama_cpp.md 4.2 and 4.3.
"""

from kvnumba.splitting.seed import split_seed
from kvnumba.splitting.splitters import split_equal, split_for, split_seq, split_simple
from kvnumba.splitting.ubatch import Ubatch, in_batch_order, output_index

__all__ = [
    "Ubatch",
    "in_batch_order",
    "output_index",
    "split_equal",
    "split_for",
    "split_seed",
    "split_seq",
    "split_simple",
]
