"""Count sketches."""
