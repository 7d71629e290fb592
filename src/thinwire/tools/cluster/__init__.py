"""Worker processes on this machine, each on a link of limited rate, and what they have in common."""
