"""FFT sparsification and the offset float (Wang et al. 2020)."""

from papers.lab.claims import HARDWARE, NETWORK, TRAINING, Paper

FFT_PAPER = Paper(
    name="fft",
    elsewhere={
        "F1": ("Communication share of a step on four models", NETWORK),
        "F2": ("AlexNet's convolutions compute 10 times longer than they communicate", NETWORK),
        "F6": ("Parallel packing is 689 times a single thread and reaches 34 GB/s", HARDWARE),
        "F13": ("All-gather latency grows almost linearly from 2 to 32 GPUs", NETWORK),
        "F15": ("theta = 0.5 trains as SGD, 0.9 is clearly worse", TRAINING),
        "F16": ("Dropping theta from 0.9 to 0 brings accuracy back", TRAINING),
        "F19": ("Accuracy change of FFT, Top-k, QSGD and TernGrad", TRAINING),
        "F20": ("Speed-up over SGD of the four", NETWORK),
        "F24": ("Highest iteration rate from 8 to 32 GPUs", NETWORK),
        "F25": ("Gains are larger on a slower network", NETWORK),
    },
)
