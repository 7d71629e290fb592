"""gTop-k (Shi et al. 2019): a binary tree of merges instead of an all-gather."""

from thinwire_lab.papers.shared.claims import Paper

GTOPK = Paper(name="gtopk")
