"""A recipe applied to one model, wherever its gradients come from: what `attach` returns, and other handles hold.

`assembly` puts an attachment together, and `served` has the verbs of handles that leave them to it.
"""
