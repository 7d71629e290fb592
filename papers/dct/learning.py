"""The claims of DCT-DP about learning, with virtual workers."""

from papers.lab.trials import RATES, Trials, Way

LIVES = (1, 10, 100, 1000)
DENSITIES = (0.25, 0.1, 0.05, 0.02, 0.005, 0.001)
_WAYS = {
    "dense": Way(recipe="dense()"),
    **{f"L = {life}": Way(recipe=f"dct_dp(density=0.05, life={life})") for life in LIVES},
    **{f"{density:g}": Way(recipe=f"dct_dp(density={density:g}, life=50)") for density in DENSITIES},
}
FC = Trials(model="vgg", workers=4, steps=200, rate=RATES["vgg"], ways=_WAYS)
MLP = Trials(model="mlp", workers=4, steps=200, rate=RATES["mlp"], ways=_WAYS)
