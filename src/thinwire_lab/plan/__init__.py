"""`thinwire plan`: whether compression pays on a network, for which tensors and by what."""
