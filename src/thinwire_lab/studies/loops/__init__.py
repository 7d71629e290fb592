"""Training loops as users write them, each beside plain DDP."""
