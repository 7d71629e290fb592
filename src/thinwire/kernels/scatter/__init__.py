"""Adding, overwriting and clearing elements by index, and adding sorted tables."""
