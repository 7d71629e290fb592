"""What a parameter server and its trainers share: the conversation, and what it carries.

`sockets` and `frames` are the conversation, over ZeroMQ with CURVE; `rendezvous` says where servers are and who joins.
`parameters` are what is trained of a model. `layout` is how they travel, in `sections` of a body, and what both sides
must have in common.
"""
