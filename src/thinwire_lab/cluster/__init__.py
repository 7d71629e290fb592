"""Worker processes on this machine, each on a link of limited rate, or threads without any; the parts they share."""
