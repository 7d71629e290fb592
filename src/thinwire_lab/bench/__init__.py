"""`thinwire bench`: what each recipe saves and costs, measured on real training over a slow link."""
