"""gTop-k (Shi et al. 2019): a binary tree of merges instead of an all-gather."""

from papers.lab.claims import NETWORK, TRAINING, Paper

GTOPK = Paper(
    name="gtopk",
    elsewhere={
        "G1": ("Ring all-reduce costs 2(P-1) alpha + 2(P-1)/P m beta", NETWORK),
        "G4": ("Updating only k global picks converges", TRAINING),
        "G5": ("P = 4: ResNet-20 like dense, VGG-16 slightly better", TRAINING),
        "G6": ("AlexNet slightly worse, ResNet-50 faster than dense", TRAINING),
        "G7": ("LSTM at density 0.005 like dense", TRAINING),
        "G8": ("Transfer time is linear in size", NETWORK),
        "G11": ("At 32 GPUs on average 6.7x dense and 1.4x Top-k", NETWORK),
        "G13": ("Selection costs about as much as computing", NETWORK),
        "G14": ("Density 0.0005 barely changes convergence", TRAINING),
        "G15": ("Batch 1024 at P = 32: ResNet-20 about -9 points", TRAINING),
        "G16": ("A smaller batch brings most of it back", TRAINING),
        "G20": ("Warm-up densities with small rates help", TRAINING),
        "G22": ("Efficiency 2.7-12x dense, 1.1-1.7x Top-k", NETWORK),
    },
)
