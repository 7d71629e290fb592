"""The recipe at work on one model, whoever delivers its gradients: what `attach` returns, and other handles hold.

`assembly` puts an attachment together, and `served` has the verbs of handles that leave them to it.
"""
