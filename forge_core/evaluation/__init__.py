"""Evaluation of policies on held-out prompts: what is sampled, what the results say, and whether to promote."""
