"""`thinwire watch`: a live view of parameter servers and their trainers."""
