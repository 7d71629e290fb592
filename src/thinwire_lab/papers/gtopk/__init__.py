"""gTop-k (Shi et al. 2019): a binary tree of merges instead of an all-gather."""
