"""S2 Reducer (Ge et al. 2021): sketches of block-sparse gradients, summed by an all-reduce."""

from papers.lab.claims import NETWORK, TRAINING, Paper

S2 = Paper(
    name="s2",
    elsewhere={
        "S4": ("SGD on embeddings keeps the rate O(1/sqrt T)", TRAINING),
        "S8": ("LSTM: 1.6x over SparCML at the same perplexity", NETWORK),
        "S9": ("GNMT-8: 1.25x over two all-gathers", NETWORK),
        "S10": ("GNMT-16: 1.4x over OmniReduce, fewer epochs", TRAINING),
        "S11": ("ResNet-50 with blocks: sparse communication -81 %, accuracy kept", NETWORK),
        "S12": ("DenseNet with blocks: same accuracy", TRAINING),
        "S13": ("GNMT-8 with blocks: 1.8x over OmniReduce", NETWORK),
        "S14": ("Communication against SparCML and all-gather", NETWORK),
        "S15": ("All-reduce is over 11 times faster than all-gather beyond 8 MB", NETWORK),
    },
)
