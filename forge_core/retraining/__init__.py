"""Retraining: from new data and the production model to a candidate, a verdict and an entry in the registry."""
