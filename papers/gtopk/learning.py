"""gTop-k's claims about learning, with virtual workers."""

from papers.lab.trials import RATES, Trials, Way

_WARM = "gtopk(density=schedules.gtopk_warmup(0.001, steps_per_epoch=20))"
_PICKS = {
    "dense": Way(recipe="dense()"),
    "topk": Way(recipe="topk(density=0.001)"),
    "0.01": Way(recipe="gtopk(density=0.01)"),
    "0.001": Way(recipe="gtopk(density=0.001)"),
    "0.0005": Way(recipe="gtopk(density=0.0005)"),
    "0.0001": Way(recipe="gtopk(density=0.0001)"),
    "exact values": Way(recipe="gtopk(density=0.001, exact_values=True)"),
    "density warm-up": Way(recipe=_WARM),
    "rate warm-up": Way(recipe="gtopk(density=0.001)", warm_up=80),
}
_MANY = {name: _PICKS[name] for name in ("dense", "topk", "0.001")}
CNN = Trials(model="resnet20", workers=4, steps=200, rate=RATES["resnet20"], ways=_PICKS)
FC = Trials(model="vgg", workers=4, steps=200, rate=RATES["vgg"], ways=_PICKS)
LM = Trials(
    model="lstm",
    workers=4,
    steps=150,
    rate=RATES["lstm"],
    ways={"dense": Way(recipe="dense()"), "gtopk": Way(recipe="gtopk(density=0.005)")},
)
CNN_OF_32 = Trials(model="resnet20", workers=32, steps=60, rate=RATES["resnet20"], ways=_MANY)
FC_OF_32 = Trials(model="vgg", workers=32, steps=100, rate=RATES["vgg"], ways=_MANY)
