"""SpecPrefill: a draft model scores a prompt, and the target reads what matters of it."""
