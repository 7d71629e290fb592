"""Worker processes on this machine, each on a link of limited rate, and the parts they share."""
