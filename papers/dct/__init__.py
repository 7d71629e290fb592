"""Dynamic Communication Thresholding (Gupta et al. 2021), data and model parallel."""

from papers.lab.claims import NETWORK, TRAINING, Paper

MODEL_PARALLEL = "judged by papers.dct.model_parallel, not by this program: see the README"
STEP_TIME = "judged by benchmarks/pipeline.py, not by this program: see the README"
HYBRID = "judged by benchmarks/server_hybrid.py, not by this program: see the README"
SERVED = "judged by benchmarks/server_clicks.py, not by this program: see the README"
CONVEX = "needs a convex readout over a thresholded layer, trained to its limit"

DCT = Paper(
    name="dct",
    elsewhere={
        "T3": ("Threshold life 1: 11 % slower than dense; 1000: 23 % faster", NETWORK),
        "T4": ("Loss within 0.01 % for every threshold life", TRAINING),
        "T5": ("Time falls with sparsity, flat above 95 %", NETWORK),
        "T6": ("No loss up to 99.5 %", TRAINING),
        "T7": ("Error feedback works with asynchrony if the buffer is drained", SERVED),
        "T8": ("DCT-MP with 2 workers: test loss by sparsity", MODEL_PARALLEL),
        "T9": ("DCT-MP with 3 workers", MODEL_PARALLEL),
        "T10": ("With more cuts even 75 % is worse than dense", MODEL_PARALLEL),
        "T11": ("DCT-DP with error feedback: test loss by sparsity", SERVED),
        "T12": ("Both at once, 3 workers", HYBRID),
        "T13": ("BLEU of a translation model by sparsity", MODEL_PARALLEL),
        "T14": ("Step time of a production model with 12 cuts", STEP_TIME),
        "T15": ("MP 90 % with DP 99 %: 37.1 % less time", STEP_TIME),
        "T16": ("DCT-MP teaches sparsity", MODEL_PARALLEL),
        "T19": ("The Laplace threshold is as good as the exact one", MODEL_PARALLEL),
        "T21": ("SGD converges as nu/(gamma + k) on strongly convex loss", CONVEX),
        "T22": ("A Gaussian sketch of activations loses", MODEL_PARALLEL),
        "T23": ("Top-k with error feedback on hidden gradients loses", MODEL_PARALLEL),
        "T26": ("Slightly better test loss than dense", MODEL_PARALLEL),
    },
)
