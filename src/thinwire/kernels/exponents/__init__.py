"""The exponents of bfloat16 numbers in a prefix code, block by block."""
