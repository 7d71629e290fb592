"""Shared by the papers' folders: recorded gradients, the judging of claims, and the report."""
