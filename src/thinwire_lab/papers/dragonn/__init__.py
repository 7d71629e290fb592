"""DRAGONN (Wang et al. 2022): indices go into hashed slots, so that selecting needs no order."""
