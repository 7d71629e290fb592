"""Parts of the study of predictions: the workers, the figures and the plots."""
