"""DRAGONN's claims about steps to a target, with eight virtual workers."""

from papers.lab.trials import RATES, Trials, Way

WAYS = {
    "dense": Way(recipe="dense()"),
    "topk": Way(recipe="topk(density=0.001)"),
    "dgc": Way(recipe="dgc(density=0.001)"),
    "hashed": Way(recipe="dragonn(density=0.001)"),
    "hashed, equal bytes": Way(recipe="dragonn(density=0.0016)"),
    "signsgd": Way(recipe="signsgd()"),
    "randomk": Way(recipe="randomk(density=0.001)"),
}
XL = Trials(model="xml", scale=0.05, workers=8, steps=150, rate=RATES["xml"], ways=WAYS)
MLP = Trials(model="mlp", workers=8, steps=200, rate=RATES["mlp"], ways=WAYS)
