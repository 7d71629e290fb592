"""The S2 Reducer's claims about learning, with virtual workers."""

from papers.lab.trials import RATES, Trials, Way

RATIOS = (2, 1, 0.5, 0.25, 0.1, 0.05)
_BLOCKS = {
    "dense": Way(recipe="dense()"),
    "union": Way(recipe="s2_reducer(packed=None)"),
    "sketch": Way(recipe="s2_reducer()"),
}
_DOUBLING = (
    "MinimumSize(minimum_size=1024, small=dense(), "
    "large=Compressed(memory=ErrorFeedback(), codec=TopK(density=0.03125), exchange=RecursiveDoubling()))"
)
TEXT = Trials(
    model="transformer",
    workers=4,
    steps=200,
    rate=RATES["transformer"],
    ways=_BLOCKS
    | {f"ratio {ratio:g}": Way(recipe=f"s2_reducer(packed=CountSketch(rows=1, ratio={ratio:g}))") for ratio in RATIOS},
)
CNN = Trials(model="resnet20", workers=4, steps=200, rate=RATES["resnet20"], ways=_BLOCKS)
SECOND = Trials(model="vgg", workers=4, steps=200, rate=RATES["vgg"], ways=_BLOCKS)
LM = Trials(model="lstm", workers=4, steps=150, rate=RATES["lstm"], ways=_BLOCKS | {"doubling": Way(recipe=_DOUBLING)})
