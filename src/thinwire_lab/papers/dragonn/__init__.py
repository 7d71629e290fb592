"""DRAGONN (Wang et al. 2022): indices go into hashed slots, so that selecting needs no order."""

from thinwire_lab.papers.shared.claims import Paper

DRAGONN = Paper(name="dragonn")
