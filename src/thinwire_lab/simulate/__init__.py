"""`thinwire simulate`: what a step would take between more workers than there are."""
