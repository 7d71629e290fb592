"""What the workers do, and what becomes of what they emit."""
