"""The five papers that this library comes from, one folder each, and what became of their claims."""
