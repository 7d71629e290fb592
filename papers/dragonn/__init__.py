"""DRAGONN (Wang et al. 2022): indices go into hashed slots, so that selecting needs no order."""

from papers.lab.claims import HARDWARE, NETWORK, TRAINING, Paper

DRAGONN = Paper(
    name="dragonn",
    elsewhere={
        "D1": ("DGC's compression is over half of all non-compute time beyond 2^24 bytes", NETWORK),
        "D2": ("Below 2^21 bytes dense synchronisation beats DGC", NETWORK),
        "D3": ("Exact Top-k loses to dense synchronisation at every size", NETWORK),
        "D4": ("DGC on ViT: 2.81x expected from bytes, 2.14x seen", NETWORK),
        "D6": ("Selection by prefix sum touches memory about 7 times as often as the lower bound", HARDWARE),
        "D8": ("Throughput over dense at 16 GPUs on four models", NETWORK),
        "D9": ("The lead over DGC grows with the number of GPUs", NETWORK),
        "D10": ("Time to target over DGC and over dense", TRAINING),
        "D11": ("Hashed slots follow dense training more closely than DGC", TRAINING),
        "D12": ("Encode of 512 MB takes 13.2 ms against DGC's 35.4 ms", HARDWARE),
        "D15": ("Gain in synchronisation time of hashing, selection and sparse decoding", NETWORK),
        "D16": ("Compressing only where it pays never hurts", NETWORK),
        "D17": ("SignSGD and Random-k need more iterations", TRAINING),
        "D18": ("Throughput: Random-k > DRAGONN > DGC and SignSGD", NETWORK),
        "D19": ("Speed-up against compression ratio", NETWORK),
        "D20": ("BERT-base: 1.34x over DGC, 3.5x over dense", NETWORK),
        "D26": ("The advantage grows on faster networks", NETWORK),
    },
)
