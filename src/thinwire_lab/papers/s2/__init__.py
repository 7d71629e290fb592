"""S2 Reducer (Ge et al. 2021): sketches of block-sparse gradients, summed by an all-reduce."""

from thinwire_lab.papers.shared.claims import Paper

S2 = Paper(name="s2")
