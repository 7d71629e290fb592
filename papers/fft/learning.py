"""The FFT paper's claims about learning, with virtual workers."""

from papers.lab.trials import RATES, Trials, Way

_LOSSY = (
    "MinimumSize(minimum_size=1024, small=dense(), "
    "large=Compressed(memory=NoMemory(), codec=TopK(density=0.15), exchange=AllGather()))"
)

WAYS = {
    "dense": Way(recipe="dense()"),
    **{f"theta {theta}": Way(recipe=f"fft(density={1 - theta:g})") for theta in (0.5, 0.85, 0.9, 0.99)},
    "recovery": Way(recipe="fft(density=schedules.recovery(0.1, at_step=140))"),
    "topk": Way(recipe=_LOSSY),
    "qsgd": Way(recipe="qsgd(bits=3, norm='l2')"),
    "terngrad": Way(recipe="terngrad(clip=None)"),
    "fft, EF": Way(recipe="fft(density=0.15, memory=ErrorFeedback())"),
    "topk, EF": Way(recipe="topk(density=0.15)"),
}
CNN = Trials(model="resnet20", workers=4, steps=200, rate=RATES["resnet20"], ways=WAYS)
FC = Trials(model="vgg", workers=4, steps=200, rate=RATES["vgg"], ways=WAYS)
