"""What a parameter server and its trainers share: the conversation, and what it carries.

`sockets` and `frames` are the conversation, over ZeroMQ with CURVE; `rendezvous` says where servers are and who joins.
`entries` is what a model has to send, and `layout` what is in a body, where either side has its parameters, and what
both must have in common.
"""
