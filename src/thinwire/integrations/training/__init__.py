"""What we see of your training: what is in each .grad, that an optimizer steps, and when a step is over.

`gradients` knows what a .grad holds and lays gradients side by side where DDP does not, `optimizers` tells who steps,
`outcomes` what became of a bucket, and `steps` puts these together. `drift` compares parameters over ranks.
"""
