"""S2 Reducer (Ge et al. 2021): sketches of block-sparse gradients, summed by an all-reduce."""
