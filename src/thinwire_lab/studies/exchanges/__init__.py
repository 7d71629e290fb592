"""Parts of the study of exchanges: the workers, and the figures from what they emit."""
