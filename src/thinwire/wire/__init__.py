"""What a parameter server and its trainers share: the conversation, and what it carries.

`sockets` and `frames` are the conversation, over ZeroMQ with CURVE; `rendezvous` says where servers are and who joins.
`layout` is what a model has to send, what is in a body, and what both sides must have in common.
"""
