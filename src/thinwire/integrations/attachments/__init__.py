"""A recipe at work on one model: `assembly` puts it together, `attachment` does the work and has the handles' verbs."""
