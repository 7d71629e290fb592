"""Who applies momentum: it moves out of optimizers into the memories, and back.

A `Handover` does that: `correction` for recipes that correct SGD's momentum, `fading` for those in which any first
moment fades. `first_moments` says what kind of optimizer it is, and warns of those that do not suit a recipe.
"""
