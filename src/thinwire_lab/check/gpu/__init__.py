"""`thinwire check --gpu`: what a bucket launches and takes on a GPU, and what a step does there."""
