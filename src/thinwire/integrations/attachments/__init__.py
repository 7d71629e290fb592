"""A recipe at work on one model: `assembly` puts it together, `served` has the verbs of handles that use it."""
