"""Vectors in slot order."""

import numpy as np

from thinwire.kernels.loops.compiled import compiled
from thinwire.kernels.loops.hashing import index_of, slot_of


@compiled
def slot_codes(indices, numel, height, keys, codes):
    for place in range(indices.size):
        index = np.int64(indices[place])
        codes[place] = height if index == numel - 1 else -1
        if 0 <= index < numel:
            slot, quotient = slot_of(index, indices.size, height, keys)
            if slot == place:
                codes[place] = quotient


@compiled
def slot_indices(codes, numel, height, keys, indices):
    for place in range(codes.size):
        code = np.int64(codes[place])
        indices[place] = numel - 1 if code == height else -1
        if 0 <= code < height:
            index = index_of(place, code, codes.size, height, keys)
            if index < numel:
                indices[place] = index
